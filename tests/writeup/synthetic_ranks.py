"""Synthetic results of the chapters with ranks and of the one on paper.

Messages follow a latency and a bandwidth for each place that ranks can have, so that the fitted
lines are known; the machine has one GPU, and its jobs have no time for the largest sizes but of the
first operation.
"""

from __future__ import annotations

import math
from typing import Any

from lmlab.experiments.calculations import measure as work_out
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.frames.collectives import MIB, bus_factor
from tests.writeup import factory

BACKENDS = {"own_gpu": "nccl", "shared_gpu": "gloo", "cpu": "gloo"}
LATENCY_MS = {"own_gpu": 0.02, "shared_gpu": 0.9, "cpu": 0.5}
BUS_GB_PER_S = {"own_gpu": 180.0, "shared_gpu": 1.1, "cpu": 1.6}
CORES = 16
NO_TIME = "3 repetitions take about 9 s, 1.5 s were left"


def collectives(point: Point, device: str = "cuda", *, gpus: int = 1) -> Result:
    """A job on a machine with that many GPUs."""
    placement, ranks = str(point.parameters["placement"]), int(point.parameters["world_size"])
    if placement == "own_gpu" and ranks > gpus:
        return factory.failed(point, "unsupported", f"needs {ranks} GPUs, {gpus} found", device)
    return factory.result(point, device, data=data_of(point, placement, ranks))


def data_of(point: Point, placement: str, ranks: int) -> dict[str, Any]:
    """What a job leaves: the group and its cases."""
    settings = point.settings
    return {
        "ranks": {
            "backend": BACKENDS[placement],
            "world_size": ranks,
            "device": "cpu" if placement == "cpu" else "cuda",
            "gpus": {"own_gpu": ranks, "shared_gpu": 1, "cpu": 0}[placement],
            "nnodes": 1,
            "threads": max(1, CORES // ranks),
        },
        "cases": [
            case(placement, ranks, operation, dtype, size)
            for operation in settings["operations"]
            for dtype in settings["dtypes"]
            for size in settings["sizes_mib"]
        ],
    }


def case(placement: str, ranks: int, operation: str, dtype: str, mib: int) -> dict[str, Any]:
    """One exchange, timed or not begun."""
    size = mib * MIB // (ranks * 4) * ranks * 4
    row = {"operation": operation, "dtype": dtype, "size_bytes": size}
    if BACKENDS[placement] == "gloo" and mib > 256 and (operation, dtype) != ("all_reduce", "fp32"):
        return {**row, "reason": NO_TIME}
    wave = 1 + 0.03 * math.sin(mib)  # no machine lies on its line
    time_ms = wave * milliseconds(placement, ranks, operation, size)
    time_ms *= 1.3 if dtype == "bf16" else 1.0
    samples = [time_ms * (1 + 0.01 * math.sin(1.7 * i)) for i in range(5)]
    medians = [time_ms * (1 - 0.02 * rank / ranks) for rank in range(ranks)]
    return {**row, **factory.measurement(samples), "rank_median_ms": medians}


def milliseconds(placement: str, ranks: int, operation: str, size: int) -> float:
    """Latency and bytes over the bus; one rank copies at the memory's pace."""
    factor = bus_factor(operation, ranks)
    if math.isnan(factor):
        return 0.02 + size / 2e9
    return LATENCY_MS[placement] * ranks + factor * size / BUS_GB_PER_S[placement] / 1e6


def calculations(point: Point, device: str = "cuda") -> Result:
    """The chapter on paper is the same everywhere, so it is worked out for real."""
    return factory.result(point, device, data=dict(work_out(point, None).data))  # type: ignore[arg-type]
