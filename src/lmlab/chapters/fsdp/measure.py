"""FSDP: what sharding everything saves and costs, beside what shards less and beside PyTorch's own.

Four arms: data parallelism with a plain optimizer, the same with sharded optimizer state, our FSDP,
and PyTorch's `fully_shard`, cut at the blocks of the model as its users cut it. Each first goes
through two steps by itself, with its memory read at the moments of the first. The losses of both
must be those of data parallelism on every rank: the first shows that forward sees the right
weights, the second that gradients and update were right. An arm that cannot run here says why, one
that is off gets no time. Then all exist at once and take turns; then our gathers are watched one by
one, over a few more steps; at last one profiled step an arm.

`data`: `choice` of the size, `parameters_total`, `parameter_bytes`, `sharded_bytes` (of parameters
that FSDP cuts), `expected` (the cost model's bytes of an unsharded rank), `arms`: `status`,
`reason`, `ranks` (moments, peaks, losses), `ranks_ms` (a list a rank), `trace`; `waits` (the median
wait for each gather in forward and backward, a list a rank; `layer` is the block, or the matrix
that travels alone), `waits_below_ms` (what counts as no wait); `tf32`, `threads`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lmlab.chapters.fsdp.gather_waits import NO_WAIT_MS, GatherWatch
from lmlab.chapters.fsdp.variants import ARMS, DDP, OURS, Builder, alone
from lmlab.jobs.autosize import Choice, choose
from lmlab.jobs.memory_stages import Training, expected_bytes
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import (
    Candidate,
    RankWork,
    candidates,
    parameter_bytes,
    release,
)
from lmlab.measure import across_ranks
from lmlab.measure.clock import PhaseClock, synchronize
from lmlab.measure.overlap import profile_overlap, start_profiler
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.rounds import Rounds, TimedStep, interleave
from lmlab.parallel.fsdp import has_matrix_weight
from lmlab.study.points import Point

STEP = "step"
WATCHED_STEPS = 3
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, time, waits and overlap of every arm; called on each rank."""
    sizes = candidates(point, device)
    build = Builder(bucket_mb=point.settings["bucket_mb"])
    with tf32_allowed(sizes[0].workload.precision.tf32):
        choice = choose(
            sizes,
            device,
            limit_s=point.settings["step_limit_s"],
            copies=8,  # the other arms, whole and in shards
            messages=1.5,  # two gathers and a scatter, each half of an all-reduce
            try_step=lambda candidate: trial_s(candidate, device, build),
        )
        work = RankWork(choice.candidate.workload, device)
        found = {name: alone(name, build, work) for name in ARMS}
        arms = {name: judged(arm, found[DDP], work) for name, arm in found.items()}
        sound = [name for name, arm in arms.items() if arm["status"] == "ok"]
        data, rounds = measure_together(point, build, work, sound)
        data["arms"] = {name: {**arm, **data["arms"].get(name, {})} for name, arm in arms.items()}
        facts = describe(choice, work)
    return Outcome(
        measurements={name: rounds.slowest(name) for name in sound}, data={**facts, **data}
    )


def trial_s(candidate: Candidate, device: torch.device, build: Builder) -> float:
    """Seconds of a step of our FSDP, the second time it runs."""
    work = RankWork(candidate.workload, device)
    training = build(OURS, work)
    seconds = 0.0
    for _ in range(2):
        synchronize(device)
        began = time.perf_counter()
        training.step(work)
        synchronize(device)
        seconds = time.perf_counter() - began
    return seconds


def judged(arm: dict[str, Any], base: dict[str, Any], work: RankWork) -> dict[str, Any]:
    """Whether an arm's losses are those of data parallelism, rank by rank."""
    if arm["status"] != "ok":
        return arm
    off = across_ranks.max_error(
        abs(found - expected) / abs(expected)
        for theirs, its in zip(arm["ranks"], base["ranks"], strict=True)
        for found, expected in zip(theirs["losses"], its["losses"], strict=True)
    )
    allowed = TOLERANCE[work.workload.precision.name]
    if off <= allowed:
        return arm
    reason = f"losses of two steps are off by {off:.2g}, allowed is {allowed:g}"
    return {**arm, "status": "failed", "reason": reason}


def measure_together(
    point: Point, build: Builder, work: RankWork, names: list[str]
) -> tuple[dict[str, Any], Rounds]:
    """Rounds, waits and traces of the arms that are sound, all alive at once."""
    device = work.device
    release(device)
    trainings = {name: build(name, work) for name in names}
    rounds = interleave(
        {name: timed(training, work) for name, training in trainings.items()},
        device=device,
        warmup=point.settings["warmup"],
        rounds=point.settings["rounds"],
        time_cap_s=point.settings["time_cap_s"],
    )
    waits = watch_gathers(trainings[OURS], work) if OURS in trainings else None
    traces = trace_arms(trainings, work)
    return {
        **weights_of(trainings),
        "waits": waits,
        "arms": {
            name: {"ranks_ms": rounds.samples_ms[name]["total"], "trace": traces[name]}
            for name in names
        },
    }, rounds


def timed(training: Training, work: RankWork) -> TimedStep:
    """A train step as one phase: an edge within it would wait for what should overlap."""

    def step(clock: PhaseClock) -> None:
        with clock.phase(STEP):
            training.optimizer.zero_grad(set_to_none=True)
            work.loss(training.model).backward()
            training.finish()
            training.optimizer.step()

    return step


def watch_gathers(training: Training, work: RankWork) -> list[list[dict[str, Any]]]:
    """How long each block waits for its weights, rank by rank."""
    watch = GatherWatch(work.device)
    for _ in range(WATCHED_STEPS):
        dist.barrier()
        with watch.watching():
            training.step(work)
    return across_ranks.gather(watch.to_json())


def trace_arms(trainings: Mapping[str, Training], work: RankWork) -> dict[str, dict[str, Any]]:
    """One profiled step of every arm: rank 0's intervals, everybody's shares."""
    start_profiler(work.device)
    traces = {}
    for name, training in trainings.items():
        dist.barrier()
        overlap = profile_overlap(partial(training.step, work), work.device)
        traces[name] = {
            **overlap.to_json(),
            "overlapped_share_by_rank": across_ranks.gather(overlap.overlapped_share),
        }
    return traces


def weights_of(trainings: Mapping[str, Training]) -> dict[str, int]:
    """How large the model is, and how much of it FSDP cuts."""
    whole = trainings[DDP].model
    cut = {
        parameter
        for layer in whole.modules()
        if has_matrix_weight(layer)
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim > 1
    }
    return {
        "parameters_total": sum(p.numel() for p in whole.parameters()),
        "parameter_bytes": parameter_bytes(whole),
        "sharded_bytes": sum(parameter.nbytes for parameter in cut),
    }


def describe(choice: Choice, work: RankWork) -> dict[str, Any]:
    """What was measured, and what the cost model expects of it."""
    return {
        "choice": choice.to_json(),
        "tokens_per_rank": work.workload.shape.tokens,
        "expected": expected_bytes(work.workload, work.device),
        "waits_below_ms": NO_WAIT_MS,
        "profiler": f"torch profiler {torch.__version__}",
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "threads": torch.get_num_threads(),
    }
