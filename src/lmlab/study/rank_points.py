"""Three chapters that train on several ranks: data parallel, sharded optimizer, FSDP.

A point is one job on a number of ranks, placed on one GPU each, on one shared GPU, or on the cores
of a CPU. The model size is chosen at run time, because the bandwidth between ranks differs between
machines by a factor of a thousand; so all candidate sizes are settings, largest first.
"""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def rank_points(
    chapter: str, study: Study, block: Mapping[str, Any], own: tuple[str, ...]
) -> list[Point]:
    """One point per placement and world size; `own` names settings specific to the chapter."""
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
