"""Grids of a block of the configuration: its axes, and further grids that change some of them."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

SHAPES = {"size": "sizes", "context": "contexts", "batch": "batches", "precision": "precisions"}


def combinations(block: Mapping[str, Any], axes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The grid and those that `more` adds to it, every combination of the axes once."""
    grids = [block, *({**block, **more} for more in block["more"])]
    found = (
        values for grid in grids for values in product(*(grid[axis] for axis in axes.values()))
    )
    yield from (dict(zip(axes, values, strict=True)) for values in dict.fromkeys(found))
