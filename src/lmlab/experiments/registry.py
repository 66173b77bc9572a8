"""Chapters by name, and the code that a point of each runs: what makes its result stale.

A chapter is named by import path and imported only when it is measured, so that parsing the
workflow costs no torch. The same strings say which source files a number depends on: the chapter,
the runner around it, and the attention variant and the model class that the point names. A variant
that no point names is in nobody's list, and can change without a single remeasurement.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from lmlab import import_path
from lmlab.attention import registry as attention
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint
from lmlab.study.points import Point

if TYPE_CHECKING:
    from lmlab.experiments.outcome import Chapter

CHAPTERS: dict[str, str] = {
    "machine": "lmlab.experiments.machine:measure",
    "end_to_end": "lmlab.experiments.end_to_end:measure",
    "precision": "lmlab.experiments.precision:measure",
}

RUNNER = "lmlab.experiments.run"


class UnknownChapter(ValueError):
    """A chapter that no module measures."""


def load(chapter: str) -> Chapter:
    """The function that measures a point of the chapter; imports that chapter alone."""
    function: Chapter = import_path.resolve(_path_of(chapter))
    return function


def code_modules(point: Point) -> list[str]:
    """The modules that a point starts from; what they import follows from their files."""
    asked = {**point.settings, **point.parameters}
    modules = [RUNNER, import_path.split(_path_of(point.chapter))[0]]
    if "attention" in asked:
        modules.append(attention.module_of(asked["attention"]))
    if "model" in asked:
        modules.append(import_path.split(asked["model"])[0])
    return modules


def fingerprint(point: Point) -> str:
    """A hash of the code that measures the point; a user's own model is found as when it runs."""
    search_path = [os.getcwd(), str(ROOT / "src"), *sys.path]
    return code_fingerprint(code_modules(point), search_path)


def _path_of(chapter: str) -> str:
    if chapter not in CHAPTERS:
        raise UnknownChapter(f"chapter = {chapter!r}; allowed: {', '.join(CHAPTERS)}")
    return CHAPTERS[chapter]
