"""Collectives: one point per placement and world size.

Operations, sizes and dtypes are settings, not parameters: one job measures them all, because
launching the ranks takes longer than most collectives.
"""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    own = {key: block[key] for key in ("time_cap_s", "operations", "dtypes", "sizes_mib")}
    settings = {**study.rank_settings(), **own, "seed": study.common["seed"]}
    return [
        Point("collectives", {"placement": placement, "world_size": world_size}, settings)
        for placement, world_sizes in block["placements"].items()
        for world_size in world_sizes
    ]
