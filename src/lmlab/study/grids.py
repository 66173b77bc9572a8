"""Grids that chapters share: combinations of a block's axes, and points with several ranks."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point

SHAPES = {"size": "sizes", "context": "contexts", "batch": "batches", "precision": "precisions"}


def combinations(
    block: Mapping[str, Any], axes: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Every distinct combination of the axes, in the block and in each variation of it that `more`
    makes by overriding keys; each is paired with the last block that contains it."""
    grids = [block, *({**block, **more} for more in block["more"])]
    found = {
        values: grid
        for grid in grids
        for values in product(*(grid[axis] for axis in axes.values()))
    }
    yield from ((dict(zip(axes, values, strict=True)), grid) for values, grid in found.items())


def rank_points(
    chapter: str, study: Study, block: Mapping[str, Any], own: tuple[str, ...]
) -> list[Point]:
    """One point per placement and world size, for a chapter that trains on ranks; `own` names
    settings specific to it.

    The model size is chosen at run time, because the bandwidth between ranks differs between
    machines by a factor of a thousand; so all candidate sizes are settings, largest first.
    """
    shared = ("step_limit_s", "warmup", "rounds", "time_cap_s")
    settings = {
        "model": study.model,
        **{key: study.common[key] for key in ("vocab_size", "rope_theta", "seed")},
        "sizes": study.shapes(block["sizes"]),
        **study.rank_settings(),
        **{key: block[key] for key in (*own, *shared)},
    }
    training = {key: block[key] for key in ("context", "batch", "precision")}
    training |= {"attention": study.common["attention"], **study.own_model()}
    return [
        Point(chapter, {"placement": placement, "world_size": world_size, **training}, settings)
        for placement, world_sizes in block["placements"].items()
        for world_size in world_sizes
    ]
