"""Which points each chapter of a study asks for: one module a chapter, a block in, points out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmlab.study.chapters import (
    attention,
    calculations,
    collectives,
    end_to_end,
    machine,
    memory,
    parallel,
    precision,
    profile,
)
from lmlab.study.config import Study
from lmlab.study.points import Point

Grid = Callable[[Study, Mapping[str, Any]], list[Point]]

# In the order of the writeup.
GRIDS: dict[str, Grid] = {
    "machine": machine.points,
    "end_to_end": end_to_end.points,
    "profile": profile.points,
    "memory": memory.points,
    "precision": precision.points,
    "attention": attention.points,
    "collectives": collectives.points,
    "data_parallel": parallel.data_parallel,
    "sharded_optimizer": parallel.sharded_optimizer,
    "fsdp": parallel.fsdp,
    "calculations": calculations.points,
}

# Chapters whose pages also read the results of others; every page reads the machine card.
READS: dict[str, tuple[str, ...]] = {
    "profile": ("end_to_end",),
    "attention": ("end_to_end",),
    "calculations": ("collectives",),
}


def points_of(study: Study, chapter: str) -> list[Point]:
    """The points of one chapter; none if the study has it switched off."""
    block = study.chapters.get(chapter)
    return [] if block is None else GRIDS[chapter](study, block)


def all_points(study: Study) -> list[Point]:
    """Every point of the study, chapter by chapter."""
    return [point for chapter in GRIDS for point in points_of(study, chapter)]
