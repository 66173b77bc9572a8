"""Collectives: one point per placement and world size.

Operations, sizes and dtypes are settings: one job measures them all, because starting the ranks
takes longer than most exchanges.

Values come from the block `collectives` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """A point for each placement and world size."""
    settings = {
        **study.rank_settings(),
        "time_cap_s": block["time_cap_s"],
        "seed": study.common["seed"],
        "operations": block["operations"],
        "dtypes": block["dtypes"],
        "sizes_mib": block["sizes_mib"],
    }
    return [
        Point("collectives", {"placement": placement, "world_size": world_size}, settings)
        for placement, world_sizes in block["placements"].items()
        for world_size in world_sizes
    ]
