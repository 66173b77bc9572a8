"""Which points each chapter of a study asks for: one module a chapter, a block in, points out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmlab.study.chapters import attention, end_to_end, machine, precision
from lmlab.study.config import Study
from lmlab.study.points import Point

Grid = Callable[[Study, Mapping[str, Any]], list[Point]]

# In the order of the writeup.
GRIDS: dict[str, Grid] = {
    "machine": machine.points,
    "end_to_end": end_to_end.points,
    "precision": precision.points,
    "attention": attention.points,
}


def points_of(study: Study, chapter: str) -> list[Point]:
    """The points of one chapter; none if the study has it switched off."""
    block = study.chapters.get(chapter)
    return [] if block is None else GRIDS[chapter](study, block)


def all_points(study: Study) -> list[Point]:
    """Every point of the study, chapter by chapter."""
    return [point for chapter in GRIDS for point in points_of(study, chapter)]
