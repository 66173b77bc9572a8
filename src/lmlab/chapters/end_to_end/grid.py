"""End to end: every size, context, batch, precision and mode, and cold starts.

The grid shares one warm-up count. `more` adds grids that override some axes, for points not worth
measuring everywhere, or the number of steps, where a step takes seconds. How much warm-up a machine
needs is measured separately, at one context (`start` = cold). Every point runs in a fresh process,
so its first step is truly the first: libraries not loaded, kernels not chosen, memory not mapped.
A cold start measures a fixed number of steps; other points stop once their median is known well
enough.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.grids import SHAPES, combinations
from lmlab.study.points import Point

AXES = {**SHAPES, "mode": "modes"}
# No optimizer: a CUDA graph would freeze its step count, which is a Python number.
GRAPH_MODE = "forward_backward"
Block = Mapping[str, Any]


def points(study: Study, block: Block) -> list[Point]:
    """The grids first, then the cold starts."""
    return [*_grids(study, block), *_cold_starts(study, block)]


def _grids(study: Study, block: Block) -> Iterator[Point]:
    checks = [{"mode": GRAPH_MODE, **check} for check in block["graph_checks"]]
    for point, grid in combinations(block, AXES):
        if grid["max_steps"] < grid["steps"]:
            raise ValueError(
                f"config: end_to_end.max_steps = {grid['max_steps']}; "
                f"allowed: at least steps = {grid['steps']}"
            )
        settings = {key: grid[key] for key in ("max_steps", "interval")}
        settings["graph_replay"] = any(check.items() <= point.items() for check in checks)
        yield _point(study, grid, point, grid["warmup"], "warm", settings)


def _cold_starts(study: Study, block: Block) -> Iterator[Point]:
    cold = block["cold_start"]
    shared = {key: cold[key] for key in ("context", "batch", "precision")}
    for mode, warmups in cold["warmups"].items():
        for size, warmup in product(cold["sizes"], warmups):
            yield _point(study, block, {"size": size, **shared, "mode": mode}, warmup, "cold", {})


def _point(
    study: Study, block: Block, point: dict[str, Any], warmup: int, start: str, settings: Block
) -> Point:
    own = {"attention": study.common["attention"], "warmup": warmup, **study.own_model()}
    common = {key: study.common[key] for key in ("time_cap_s", "skip_if_too_large")}
    shared = {**study.size_settings(point["size"]), "steps": block["steps"], **common}
    return Point("end_to_end", {**point, **own, "start": start}, {**shared, **settings})
