"""Chapters by name, and the code that each point runs, whose changes make its result stale.

Chapters are found by package name: a list of them would be code that every point runs, so a new
chapter would make all results stale. A result depends on the source files of its chapter and topic,
of the runner, and of the attention variants and the model class that the point names. Editing a
variant that no point names makes nothing stale.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from lmlab import import_path
from lmlab.attention import registry as attention
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint, locate
from lmlab.study.points import Point
from lmlab.study.sources import may_define

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Outcome

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
    "lmlab.measure.warm_start*",
    "lmlab.study*",
)


def load(chapter: str) -> Callable[[Point, torch.device], Outcome]:
    """The function that measures a point of the chapter; imports only that chapter."""
    return import_path.resolve(f"lmlab.chapters.{chapter}.measure:measure")


def has_ranks(point: Point) -> bool:
    """Whether the point is measured by ranks that torchrun starts."""
    return "world_size" in point.parameters


def code_modules(point: Point) -> list[str]:
    """The root modules of a point's code; what they import is found by reading their files."""
    runner = RANK_RUNNER if has_ranks(point) else RUNNER
    chapter = f"lmlab.chapters.{point.chapter}.measure"
    topic = f"{chapter}.{point.parameters.get('topic')}"
    named = [import_path.split(path)[0] for _, _, path in _named_code(point)]
    # Topic modules are imported by name, like variants, so no import statement leads to them.
    return [runner, chapter, *([topic] if locate(topic, search_path()) else []), *named]


def check_code(point: Point) -> None:
    """Check that the model and the attention variants of a point exist, without importing them."""
    for key, name, path in _named_code(point):
        if reason := _why_missing(*import_path.split(path)):
            problem = (
                f"{key} = {name!r}: {reason}; allowed: an import path of something that exists"
            )
            raise import_path.ImportPathError(problem)


def _named_code(point: Point) -> Iterator[tuple[str, str, str]]:
    """Key, name and import path of the code that a point names."""
    asked = {**point.settings, **point.parameters}
    if "attention" in asked:
        yield "attention", asked["attention"], attention.path_of(asked["attention"])
    for variant in asked.get("variants", ()):
        yield "variants", variant, attention.path_of(variant)
    if "model" in asked:
        yield "model", asked["model"], asked["model"]


def _why_missing(module: str, name: str) -> str | None:
    file = locate(module, search_path())
    if file is None:
        return f"module {module!r} is not on the Python path"
    try:
        return None if may_define(file, name) else f"there is no {name!r} in {file}"
    except ValueError as error:
        return str(error)


def fingerprint(point: Point) -> str:
    """A hash of the code that measures the point; user code is looked up as at run time."""
    return fingerprint_of(tuple(code_modules(point)), search_path())


@cache  # hundreds of points run the same few modules
def fingerprint_of(modules: tuple[str, ...], path: tuple[str, ...]) -> str:
    """A hash of the code reachable from these modules."""
    return code_fingerprint(modules, path, excluded=EXCLUDED_FROM_FINGERPRINT)


def search_path() -> tuple[str, ...]:
    """Module search path: the working folder, then our sources, then installed packages."""
    return (os.getcwd(), str(ROOT / "src"), *sys.path)
