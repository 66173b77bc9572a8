"""Chapters by name, and the code that a point of each runs: what makes its result stale.

The module of a chapter is named after it, so there is no list of chapters here: a list would be
code that every point runs, and a new chapter would make the results of all others stale. It is
imported when it is measured; parsing the workflow costs no torch.

The same names say which source files a number depends on: the chapter and its topic, the runner
around it, and the attention variants and the model class that the point names. A variant that no
point names is in nobody's closure, and can change without a single remeasurement.
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
# What names, lists, files or refuses a measurement without moving its number: a variant more,
# another label in a result or a new version of the package must not send anybody back to the
# machine.
NOT_COUNTED = (
    "lmlab",
    "lmlab.attention",
    "lmlab.attention.registry",
    "lmlab.attention.support",
    "lmlab.jobs.record",
    "lmlab.jobs.preflight",
    "lmlab.jobs.registry",
    "lmlab.import_path",
    "lmlab.measure.environment",
    "lmlab.study",
    "lmlab.study.*",
)


class NoSuchCode(ValueError):
    """An import path that leads to nothing, in one line."""


def path_of(chapter: str) -> str:
    """Import path of the function that measures a chapter; imports nothing."""
    return f"lmlab.chapters.{chapter}.measure:measure"


def load(chapter: str) -> Chapter:
    """The function that measures a point of the chapter; imports that chapter alone."""
    function: Chapter = import_path.resolve(path_of(chapter))

    def measure(point: Point, device: torch.device) -> Outcome:
        # Here, because it imports torch, which naming a chapter must not cost.
        from lmlab.jobs.preflight import refuse_unsupported

        refuse_unsupported(point, device)
        return function(point, device)

    return measure


def code_modules(point: Point) -> list[str]:
    """The modules that a point starts from; what they import follows from their files."""
    asked = {**point.settings, **point.parameters}
    runner = RANK_RUNNER if has_ranks(point) else RUNNER
    chapter = import_path.split(path_of(point.chapter))[0]
    modules = [runner, chapter, *_module_of_topic(chapter, asked.get("topic"))]
    if "attention" in asked:
        modules.append(attention.module_of(asked["attention"]))
    modules += [attention.module_of(variant) for variant in asked.get("variants", ())]
    if "model" in asked:
        modules.append(import_path.split(asked["model"])[0])
    return modules


def check_code(point: Point) -> None:
    """The model and the attention variants that a point names are there; imports none of them."""
    asked = {**point.settings, **point.parameters}
    named: list[tuple[str, str]] = [
        (key, asked[key]) for key in ("model", "attention") if key in asked
    ]
    named += [("variants", variant) for variant in asked.get("variants", ())]
    for key, name in named:
        path = name if key == "model" else attention.path_of(name)
        if reason := _why_not_there(path):
            raise NoSuchCode(f"{key} = {name!r}: {reason}; allowed: what can be imported")


def _why_not_there(path: str) -> str | None:
    module, name = import_path.split(path)
    file = locate(module, tuple(search_path()))
    if file is None:
        return f"module {module!r} is not on the Python path"
    try:
        return None if may_define(file, name) else f"there is no {name!r} in {file}"
    except BrokenSource as error:
        return str(error)


def has_ranks(point: Point) -> bool:
    """Whether the point is measured by several processes, which torchrun starts."""
    return "world_size" in point.parameters


def _module_of_topic(chapter: str, topic: str | None) -> list[str]:
    """A chapter that is a package has a module for each topic, imported by name as a variant is."""
    name = f"{chapter}.{topic}"
    return [name] if topic and locate(name, tuple(search_path())) else []


def fingerprint(point: Point) -> str:
    """A hash of the code that measures the point."""
    return fingerprint_of(tuple(code_modules(point)))


def fingerprint_of(modules: tuple[str, ...]) -> str:
    """A hash of the code that starts from modules; a user's own are found as when they run."""
    return code_fingerprint(modules, search_path(), leaving_out=NOT_COUNTED)


def search_path() -> list[str]:
    """Where modules are looked for: here first, then among our sources, then installed."""
    return [os.getcwd(), str(ROOT / "src"), *sys.path]
