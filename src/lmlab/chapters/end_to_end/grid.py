"""End to end: every size, context, batch, precision and mode, and cold starts.

The grid shares one warm-up count. `more` adds grids that change some of its axes, for what is not
worth measuring everywhere. How much warm-up a machine needs is a question of its own, answered at
one context with a fresh process per point (`start` = cold), because only there is the first step
really the first: libraries not loaded, kernels not chosen, memory not mapped. Its steps are a fixed
number; elsewhere a point is measured until its median is known well enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point

AXES = ("sizes", "contexts", "batches", "precisions", "modes")
# A graph is captured of what has a backward pass and no optimizer, whose step count is Python's.
GRAPH_MODE = "forward_backward"


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The grids first, then the cold starts."""
    if block["max_steps"] < block["steps"]:
        raise ValueError(
            f"config: end_to_end.max_steps = {block['max_steps']}; "
            f"allowed: at least steps = {block['steps']}"
        )
    return [*_grids(study, block), *_cold_starts(study, block)]


def _grids(study: Study, block: Mapping[str, Any]) -> list[Point]:
    grids = [block, *({**block, **more} for more in block["more"])]
    combinations = (product(*(grid[axis] for axis in AXES)) for grid in grids)
    unique = dict.fromkeys(values for grid in combinations for values in grid)
    until = {key: block[key] for key in ("max_steps", "interval")}
    found = [
        _point(study, block, *values, warmup=block["warmup"], start="warm", **until)
        for values in unique
    ]
    return [_with_graph_replay(point, block) for point in found]


def _with_graph_replay(point: Point, block: Mapping[str, Any]) -> Point:
    """The point, with its check of device time if the study asks for one here."""
    asked = [{"mode": GRAPH_MODE, **check} for check in block["graph_checks"]]
    checked = any(check.items() <= point.parameters.items() for check in asked)
    return Point(point.chapter, point.parameters, {**point.settings, "graph_replay": checked})


def _cold_starts(study: Study, block: Mapping[str, Any]) -> list[Point]:
    cold = block["cold_start"]
    shared = (cold["context"], cold["batch"], cold["precision"])
    return [
        _point(study, block, size, *shared, mode, warmup=warmup, start="cold")
        for mode, warmups in cold["warmups"].items()
        for size, warmup in product(cold["sizes"], warmups)
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
    **settings: Any,
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
    shared = {
        **study.size_settings(size),
        "steps": block["steps"],
        "time_cap_s": study.common["time_cap_s"],
        "skip_if_too_large": study.common["skip_if_too_large"],
    }
    return Point("end_to_end", parameters, {**shared, **settings})
