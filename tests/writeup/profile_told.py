"""Changes to a small profile, for sentences that speak of sizes."""

from __future__ import annotations

from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.writeup.small_profile import (
    recording,
)


def by_size(small: dict[str, Any], medium: dict[str, Any]) -> Any:
    """A maker with other numbers for each size."""

    def make(point: Point) -> Result:
        return recording(point, **(small if point.parameters["size"] == "small" else medium))

    return make


def all_alike(**changes: Any) -> Any:
    """A maker with the same numbers for every point."""
    return lambda point: recording(point, **changes)
