"""Profile: one point per size and context; a point records all three modes in one process.

Values come from the block `profile` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """One point per size, context, batch and precision."""
    axes = (block[axis] for axis in ("sizes", "contexts", "batches", "precisions"))
    return [_point(study, block, *values) for values in product(*axes)]


def _point(
    study: Study, block: Mapping[str, Any], size: str, context: int, batch: int, precision: str
) -> Point:
    parameters = {
        "size": size,
        "context": context,
        "batch": batch,
        "precision": precision,
        **study.own_model(),
        "attention": study.common["attention"],
    }
    settings = {
        **study.size_settings(size),
        "warmup": block["warmup"],
        "steps": block["steps"],
        "time_cap_s": study.common["time_cap_s"],
        "skip_if_too_large": study.common["skip_if_too_large"],
        "profiler": block["profiler"],
        "keep_traces": block["keep_traces"],
    }
    return Point("profile", parameters, settings)
