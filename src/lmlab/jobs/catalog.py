"""The points of a study, chapter by chapter, in the order of the blocks in config.yaml.

A chapter is the package `lmlab.chapters.<name>`; its `grid` module turns the study's block into
points. There is no list of chapters to maintain: the study names them.
"""

from importlib import import_module
from pkgutil import iter_modules

import lmlab.chapters
from lmlab.study.config import Study
from lmlab.study.points import Point


def chapters() -> list[str]:
    """The names of all chapters."""
    return sorted(m.name for m in iter_modules(lmlab.chapters.__path__) if m.ispkg)


def points_of(study: Study, chapter: str) -> list[Point]:
    """The points of one chapter; none if the study leaves it out."""
    block = study.chapters.get(chapter)
    if block is None:
        return []
    return import_module(f"lmlab.chapters.{chapter}.grid").points(study, block)


def all_points(study: Study) -> list[Point]:
    """Every point of the study."""
    return [point for chapter in study.chapters for point in points_of(study, chapter)]
