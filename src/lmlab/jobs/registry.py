"""Chapters by name, and the code that a point of each runs: what makes its result stale.

A chapter is a package named after it, so there is no list of chapters here: such a list would be
code that every point runs, and a new chapter would make the results of all others stale. It is
imported when it is measured; parsing the workflow does not import torch.

The same names say which source files a number depends on: the chapter and its topic, the runner
around it, and the attention variants and the model class that the point names. A variant that no
point names is in no closure, and can change without a single remeasurement.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from lmlab import import_path
from lmlab.attention import registry as attention
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint, locate
from lmlab.study.points import Point
from lmlab.study.source_text import BrokenSource, may_define

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Chapter, Outcome

RUNNER = "lmlab.jobs.run"
RANK_RUNNER = "lmlab.jobs.ranks"
RANK_ERRORS = "LMLAB_RANK_ERRORS"
"""Environment variable: the folder in which a failing rank writes its error file."""
# Code that names, lists, starts, stores or refuses a measurement without changing its numbers: a
# new variant, another key in a result or a new version must not make results stale.
EXCLUDED_FROM_FINGERPRINT = (
    "lmlab",
    "lmlab.attention",
    "lmlab.attention.registry",
    "lmlab.attention.support",
    "lmlab.import_path",
    "lmlab.jobs.budget",
    "lmlab.jobs.preflight",
    "lmlab.jobs.record",
    "lmlab.jobs.registry",
    "lmlab.measure.environment",
    "lmlab.measure.exclusive",
    "lmlab.measure.warm_start",
    "lmlab.measure.warm_start.*",
    "lmlab.study",
    "lmlab.study.*",
)


class NoSuchCode(ValueError):
    """An import path that does not exist, in one line."""


def path_of(chapter: str) -> str:
    """Import path of the function that measures a chapter; imports nothing."""
    return f"lmlab.chapters.{chapter}.measure:measure"


def load(chapter: str) -> Chapter:
    """The function that measures a point of the chapter; imports only that chapter."""
    function: Chapter = import_path.resolve(path_of(chapter))

    def measure(point: Point, device: torch.device) -> Outcome:
        from lmlab.jobs.preflight import refuse_unsupported  # imports torch

        refuse_unsupported(point, device)
        return function(point, device)

    return measure


def has_ranks(point: Point) -> bool:
    """Whether the point is measured by several processes, which torchrun starts."""
    return "world_size" in point.parameters


def code_modules(point: Point) -> list[str]:
    """The modules that a point starts from; what they import follows from their files."""
    runner = RANK_RUNNER if has_ranks(point) else RUNNER
    chapter = import_path.split(path_of(point.chapter))[0]
    topic = f"{chapter}.{point.parameters.get('topic')}"
    named = [import_path.split(path)[0] for _, _, path in _named_code(point)]
    # A chapter with topics imports the module of the point's topic by name, as a variant's.
    return [runner, chapter, *([topic] if locate(topic, tuple(search_path())) else []), *named]


def check_code(point: Point) -> None:
    """Check that the model and the attention variants of a point exist, without importing them."""
    for key, name, path in _named_code(point):
        if reason := _why_missing(path):
            raise NoSuchCode(f"{key} = {name!r}: {reason}; allowed: anything importable")


def _named_code(point: Point) -> list[tuple[str, str, str]]:
    """Key, name and import path of the code that a point names."""
    asked = {**point.settings, **point.parameters}
    names = [("attention", asked["attention"])] if "attention" in asked else []
    names += [("variants", variant) for variant in asked.get("variants", ())]
    named = [(key, name, attention.path_of(name)) for key, name in names]
    return [*named, *([("model", asked["model"], asked["model"])] if "model" in asked else [])]


def _why_missing(path: str) -> str | None:
    module, name = import_path.split(path)
    file = locate(module, tuple(search_path()))
    if file is None:
        return f"module {module!r} is not on the Python path"
    try:
        return None if may_define(file, name) else f"there is no {name!r} in {file}"
    except BrokenSource as error:
        return str(error)


def fingerprint(point: Point) -> str:
    """A hash of the code that measures the point."""
    return fingerprint_of(tuple(code_modules(point)))


def fingerprint_of(modules: tuple[str, ...]) -> str:
    """A hash of the code that starts from modules; a user's own are found as when they run."""
    return code_fingerprint(modules, search_path(), excluded=EXCLUDED_FROM_FINGERPRINT)


def search_path() -> list[str]:
    """Where modules are looked for: here first, then among our sources, then installed."""
    return [os.getcwd(), str(ROOT / "src"), *sys.path]
