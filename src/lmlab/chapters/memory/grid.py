"""Memory: every size, context and precision, largest size first, and checkpointing.

A point of the grid measures all modes, one after the other in one process; checkpointing is one
point whose variants are the strategies, because times are comparable only inside one process.

Values come from the block `memory` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The grid first, then checkpointing."""
    axes = (block[axis] for axis in ("sizes", "contexts", "precisions"))
    grid = [_timeline(study, block, *values) for values in product(*axes)]
    return [*grid, _checkpointing(study, block["checkpointing"])]


def _timeline(
    study: Study, block: Mapping[str, Any], size: str, context: int, precision: str
) -> Point:
    settings = {
        **study.size_settings(size),
        "skip_if_too_large": study.common["skip_if_too_large"],
        "keep_snapshots": block["keep_snapshots"],
    }
    return Point(
        "memory", _parameters(study, "timeline", size, context, block["batch"], precision), settings
    )


def _checkpointing(study: Study, block: Mapping[str, Any]) -> Point:
    settings = {
        **study.size_settings(block["size"]),
        "strategies": ",".join(block["strategies"]),
        "rounds": block["rounds"],
        "steps": block["steps"],
        "time_cap_s": study.common["time_cap_s"],
    }
    place = (block["size"], block["context"], block["batch"], block["precision"])
    return Point("memory", _parameters(study, "checkpointing", *place), settings)


def _parameters(
    study: Study, topic: str, size: str, context: int, batch: int, precision: str
) -> dict[str, Any]:
    return {
        "topic": topic,
        "size": size,
        "context": context,
        "batch": batch,
        **study.own_model(),
        "attention": study.common["attention"],
        "precision": precision,
    }
