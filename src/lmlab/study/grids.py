"""Grids of a block of the configuration: its axes, and more grids that change some keys."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

SHAPES = {"size": "sizes", "context": "contexts", "batch": "batches", "precision": "precisions"}


def combinations(
    block: Mapping[str, Any], axes: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Every combination of the axes once, of the block and of those that `more` makes of it by
    changing some keys; each with the first of these blocks that has it."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for grid in [block, *({**block, **more} for more in block["more"])]:
        for values in product(*(grid[axis] for axis in axes.values())):
            found.setdefault(values, grid)
    yield from ((dict(zip(axes, values, strict=True)), grid) for values, grid in found.items())
