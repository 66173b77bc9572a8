"""The arms of the FSDP comparison, what a layer waits for, and what a step must send.

Per rank and step, of N ranks, in bytes sent by rings: data parallelism averages P bytes of
gradients, 2 (N-1)/N P; a sharded optimizer sends parameters on top, (N-1)/N P more; FSDP gathers
its matrices twice and scatters their gradients once, 3 (N-1)/N P. The backend may do worse: gloo
makes a reduce-scatter of an all-reduce.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmlab.writeup.frames.rank_jobs import Job, slowest, sound
from lmlab.writeup.paired import RatioInterval, ratio_interval

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
LABELS = {
    DDP: "data parallel",
    SHARDED: "with sharded optimizer",
    OURS: "FSDP",
    TORCH: "PyTorch fully_shard",
}
WORDS = {
    DDP: "that of data parallelism",
    SHARDED: "that of data parallelism with a sharded optimizer",
}
WITH = {
    DDP: "data parallelism",
    SHARDED: "a sharded optimizer",
    OURS: "FSDP",
    TORCH: "PyTorch fully_shard",
}
PHASES = ("forward", "backward")


def samples(job: Job) -> dict[str, list[float]]:
    """Step times of the slowest rank, round by round, of every arm that has them."""
    return {name: slowest(arm["ranks_ms"]) for name, arm in sound(job.data["arms"]).items()}


def against(job: Job, base: str) -> RatioInterval | None:
    """Our FSDP's step over that of another arm."""
    times = samples(job)
    if OURS not in times or base not in times:
        return None
    return ratio_interval(times[OURS], times[base])


def with_memory(job: Job) -> dict[str, Mapping[str, Any]]:
    """The arms whose memory was read."""
    return {name: arm for name, arm in job.data["arms"].items() if "ranks" in arm}


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Gathers of one phase: how many layers, how many of them found their weight there."""

    phase: str
    layers: int
    in_time: int
    total_ms: float
    longest_ms: float
    longest_layer: str


def waits(job: Job) -> list[Waits]:
    """By phase, each layer with the rank on which it waits longest."""
    if not job.data["waits"]:
        return []
    return [_waits(job, phase) for phase in PHASES if layer_waits(job, phase)]


def layer_waits(job: Job, phase: str) -> dict[str, float]:
    """Milliseconds that each layer waits, on the rank where it waits longest, in order of use."""
    by_layer: dict[str, float] = {}
    for rank in job.data["waits"] or []:
        for row in rank:
            if row["phase"] == phase:
                layer = str(row["layer"])
                by_layer[layer] = max(by_layer.get(layer, 0.0), float(row["wait_ms"]))
    return by_layer


def _waits(job: Job, phase: str) -> Waits:
    by_layer = layer_waits(job, phase)
    longest = max(by_layer, key=lambda layer: by_layer[layer])
    return Waits(
        phase=phase,
        layers=len(by_layer),
        in_time=sum(wait <= job.data["waits_below_ms"] for wait in by_layer.values()),
        total_ms=max(
            sum(float(row["wait_ms"]) for row in rank if row["phase"] == phase)
            for rank in job.data["waits"]
        ),
        longest_ms=by_layer[longest],
        longest_layer=longest.removesuffix(".weight"),
    )


def waited_ms(job: Job) -> float:
    """All waits of a step on the rank that waits longest."""
    return max(sum(float(row["wait_ms"]) for row in rank) for rank in job.data["waits"])


def step_ms(job: Job, arm: str) -> float | None:
    """Median step of an arm."""
    times = samples(job)
    return statistics.median(times[arm]) if arm in times else None


def expected_bytes(job: Job, arm: str) -> dict[str, float] | None:
    """What the cost model expects of a rank by part; None for a model that it does not know."""
    model = job.data["expected"]
    if model is None:
        return None
    whole = int(job.data["parameter_bytes"])
    cut = {TORCH: whole, OURS: int(job.data["sharded_bytes"])}.get(arm, 0)
    saved = cut * (1 - 1 / job.world_size)
    state = {SHARDED: whole * (1 - 1 / job.world_size)}.get(arm, saved)
    return {
        "parameters": model["parameters"] - saved,
        "gradients": model["gradients"] - saved,
        "optimizer_state": model["optimizer_state"] * (1 - state / whole),
        "activations": float(model["activations"]),
    }


def sent_bytes(job: Job) -> dict[str, float]:
    """What a rank must send in a step, by arm."""
    whole, cut = int(job.data["parameter_bytes"]), int(job.data["sharded_bytes"])
    share = (job.world_size - 1) / job.world_size
    fully = share * (3 * cut + 2 * (whole - cut))
    return {
        DDP: 2 * share * whole,
        SHARDED: 3 * share * whole,
        OURS: fully,
        TORCH: 3 * share * whole,
    }
