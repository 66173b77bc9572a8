"""The arms of the FSDP comparison, what a layer waits for, and what a step must send.

Per rank and step, of N ranks, in bytes sent by rings: data parallelism averages P bytes of
gradients, 2 (N-1)/N P; a sharded optimizer sends parameters on top, (N-1)/N P more; FSDP gathers
its matrices twice and scatters their gradients once, 3 (N-1)/N P. What stays between forward and
backward is gathered once only. Ours keeps the block that ends forward and begins backward;
PyTorch's keeps its root, and how much that is shows in its parameters after forward. The backend
may do worse: gloo makes a reduce-scatter of an all-reduce.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmlab.writeup.frames.rank_jobs import Job, size_settings, slowest, sound
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
HARDLY = 5
"""A wait of up to so many times what asking costs is one of little."""


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


def kept_layer(job: Job) -> str | None:
    """The block that ends forward and begins backward: its weights stay, nobody gathers them again.

    None where none does, or where nobody looked.
    """
    rows = [row for rank in job.data["waits"] or [] for row in rank]
    forward, backward = ([row["layer"] for row in rows if row["phase"] == p] for p in PHASES)
    # Rows are in the order in which blocks asked, rank by rank.
    last = forward[len(set(forward)) - 1] if forward else None
    return str(last) if last is not None and backward and backward[0] == last else None


def waits(job: Job) -> list[Waits]:
    """By phase, each layer with the rank on which it waits longest."""
    return [_waits(job, phase) for phase in PHASES if layer_waits(job, phase)]


def layer_waits(job: Job, phase: str) -> dict[str, float]:
    """Milliseconds that each layer waits for its gather, on the rank where it waits longest."""
    by_layer: dict[str, float] = {}
    for rank in _gathers(job):
        for row in rank:
            if row["phase"] == phase:
                layer = short(row["layer"])
                by_layer[layer] = max(by_layer.get(layer, 0.0), float(row["wait_ms"]))
    return by_layer


def short(layer: str) -> str:
    """The name of a block, or of the layer whose matrix travels alone."""
    return layer.removesuffix(".weight")


def _gathers(job: Job) -> list[list[Mapping[str, Any]]]:
    """Waits for weights that were gathered, rank by rank, in order of use."""
    kept = kept_layer(job)
    return [
        [row for row in rank if not (row["phase"] == PHASES[1] and row["layer"] == kept)]
        for rank in job.data["waits"] or []
    ]


def _waits(job: Job, phase: str) -> Waits:
    by_layer = layer_waits(job, phase)
    longest = max(by_layer, key=lambda layer: by_layer[layer])
    return Waits(
        phase=phase,
        layers=len(by_layer),
        in_time=sum(wait <= job.data["waits_below_ms"] for wait in by_layer.values()),
        total_ms=max(
            sum(float(row["wait_ms"]) for row in rank if row["phase"] == phase)
            for rank in _gathers(job)
        ),
        longest_ms=by_layer[longest],
        longest_layer=longest,
    )


def hardly_late(job: Job) -> dict[str, float]:
    """Gathers that miss their moment by little: `layers.6 in backward` and how long it waits."""
    limit = job.data["waits_below_ms"]
    return {
        f"{layer} in {phase}": wait
        for phase in PHASES
        for layer, wait in layer_waits(job, phase).items()
        if limit < wait <= HARDLY * limit
    }


def all_late(job: Job) -> bool:
    """Whether on every rank every layer waits for its gather, and not just by little."""
    limit = HARDLY * job.data["waits_below_ms"]
    return all(row["wait_ms"] > limit for rank in _gathers(job) for row in rank)


def waited_ms(job: Job) -> float:
    """All waits of a step on the rank that waits longest."""
    return max(sum(float(row["wait_ms"]) for row in rank) for rank in _gathers(job))


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
    """What a rank must send in a step, by arm; of ours and PyTorch's at most that."""
    whole, cut = int(job.data["parameter_bytes"]), int(job.data["sharded_bytes"])
    share = (job.world_size - 1) / job.world_size
    return {
        DDP: 2 * share * whole,
        SHARDED: 3 * share * whole,
        OURS: share * (3 * cut + 2 * (whole - cut) - (_kept_by_ours(job) or 0)),
        TORCH: 3 * share * whole - (_saved_by_torch(job) or 0),
    }


def message_gb_per_s(job: Job) -> dict[str, float]:
    """Bytes that a rank must send over the time in which any of its messages is under way."""
    sent = sent_bytes(job)
    under_way = {
        name: float(arm["trace"]["communication_ms"])
        for name, arm in sound(job.data["arms"]).items()
        if arm["trace"]["seen_as"] is not None
    }
    return {name: sent[name] / ms / 1e6 for name, ms in under_way.items() if ms}


def sends_at_most(job: Job) -> set[str]:
    """Arms of which it is not known what they keep between forward and backward."""
    known = {OURS: _kept_by_ours(job), TORCH: _saved_by_torch(job)}
    return {arm for arm, count in known.items() if count is None}


def _kept_by_ours(job: Job) -> float | None:
    """Bytes of the matrix that is gathered once; None where its size is not known."""
    kept = kept_layer(job)
    if kept is None or short(kept) == kept or job.data["expected"] is None:
        return None  # a block of several matrices, or a model whose shapes nobody knows
    # What travels alone in the study's own model has a row for every token of the vocabulary.
    entries = int(job.result.settings["vocab_size"]) * int(size_settings(job)["d_model"])
    return entries * job.data["parameter_bytes"] / job.data["parameters_total"]


def _saved_by_torch(job: Job) -> float | None:
    """What of a second gather is spared: the other ranks' share of what is whole after forward."""
    if TORCH not in with_memory(job):
        return None
    return max(
        float(after["parts_bytes"]["parameters"] - before["parts_bytes"]["parameters"])
        for rank in with_memory(job)[TORCH]["ranks"]
        for before, after in [(rank["moments"]["initialised"], rank["moments"]["after_forward"])]
    )
