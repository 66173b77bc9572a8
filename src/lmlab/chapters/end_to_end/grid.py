"""End to end: every size, context, batch, precision and mode, and cold starts.

The grid shares one warm-up count. How much warm-up a machine needs is a question of its own,
answered at one context with a fresh process per point (`start` = cold), because only there is the
first step really the first: libraries not loaded, kernels not chosen, memory not mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The grid first, then the cold starts."""
    return [*_grid(study, block), *_cold_starts(study, block)]


def _grid(study: Study, block: Mapping[str, Any]) -> list[Point]:
    axes = (block[axis] for axis in ("sizes", "contexts", "batches", "precisions", "modes"))
    return [
        _point(study, block, *values, warmup=block["warmup"], start="warm")
        for values in product(*axes)
    ]


def _cold_starts(study: Study, block: Mapping[str, Any]) -> list[Point]:
    cold = block["cold_start"]
    shared = (cold["context"], cold["batch"], cold["precision"], cold["mode"])
    return [
        _point(study, block, size, *shared, warmup=warmup, start="cold")
        for size, warmup in product(block["sizes"], cold["warmups"])
    ]


def _point(
    study: Study,
    block: Mapping[str, Any],
    size: str,
    context: int,
    batch: int,
    precision: str,
    mode: str,
    *,
    warmup: int,
    start: str,
) -> Point:
    parameters = {
        "size": size,
        "context": context,
        "batch": batch,
        "precision": precision,
        "mode": mode,
        "attention": study.common["attention"],
        "warmup": warmup,
        **study.own_model(),
        "start": start,
    }
    settings = {
        **study.size_settings(size),
        "steps": block["steps"],
        "time_cap_s": study.common["time_cap_s"],
        "skip_if_too_large": study.common["skip_if_too_large"],
    }
    return Point("end_to_end", parameters, settings)
