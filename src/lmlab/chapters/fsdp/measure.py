"""FSDP: what sharding parameters, gradients and optimizer state saves and costs.

Four variants: data parallelism with a plain optimizer, the same with a sharded optimizer, our FSDP,
and PyTorch's `fully_shard`. Each first runs two steps alone, with memory read at the stages of the
first. The losses of both steps must be those of data parallelism on every rank: the first shows
that forward uses the right weights, the second that gradients and update were right. A variant that
cannot run here has a reason; one that is wrong gets no time. Then the variants take turns: each is
built for its turn, runs a step that allocates its state, then the timed one, and is freed, so that
a job needs the memory of one variant. After that each gather of our FSDP is timed for a few steps,
and finally one step of each variant is profiled.

Records, besides those of `autosize`, `memory_stages` and `rank_records`: `loss` per variant, step
and rank; `parameter_bytes`, `sharded_bytes` (of the parameters that FSDP shards); `gather_wait`:
the sum of all waits for weights in a step, per phase and rank.
`data.waits_ms`: the median wait of each block per phase, one number per rank.
`data.intervals_ms`: rank 0's timeline per variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.chapters.fsdp.gather_waits import GatherWatch
from lmlab.chapters.fsdp.variants import DDP, OURS, SHARDED, TORCH, Build, builder, two_steps_alone
from lmlab.jobs.autosize import choose
from lmlab.jobs.memory_stages import expected_records, memory_records
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_records import (
    Ready,
    overlap_records,
    round_records,
    take_turns,
    work_records,
)
from lmlab.jobs.rank_work import (
    Candidate,
    RankWork,
    candidates,
    parameter_bytes,
    release,
    second_step_s,
)
from lmlab.measure import across_ranks
from lmlab.measure.clock import PhaseClock
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, value, without_value
from lmlab.measure.rounds import TimedStep
from lmlab.parallel.fsdp import has_matrix_weight
from lmlab.study.points import Point

STEP = "step"
WATCHED_STEPS = 3
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}
Alone = Mapping[str, list[dict[str, Any]] | str]


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, time, waits and overlap of every variant; called on each rank."""
    sizes = candidates(point, device)
    build = builder(point.settings["bucket_mb"])
    with tf32_allowed(sizes[0].workload.precision.tf32):
        choice = choose(
            sizes,
            device,
            limit_s=point.settings["step_limit_s"],
            messages=1.5,  # two gathers and a scatter, each half of an all-reduce
            try_step=lambda candidate: trial_s(candidate, device, build),
        )
        work = RankWork(choice.candidate.workload, device)
        alone = {name: two_steps_alone(name, build, work) for name in (DDP, SHARDED, OURS, TORCH)}
        checks, correct = check(alone, TOLERANCE[work.workload.precision.name])
        times, data = measure_in_turn(point, build, work, correct)
        expected = expected_records(work.workload, device)
    records = [*times, *checks, *choice.records("memory and time"), *expected]
    return Outcome(measurements=records, data=data)


def trial_s(candidate: Candidate, device: torch.device, build: Build) -> float:
    """Seconds of a step of our FSDP."""
    work = RankWork(candidate.workload, device)
    return second_step_s(partial(build(OURS, work).step, work), device)


def check(alone: Alone, allowed: float) -> tuple[list[Record], list[str]]:
    """Memory and losses of every variant that ran, reasons for the others, and which variants have
    the losses of data parallelism."""
    records: list[Record] = []
    correct = []
    for name, ranks in alone.items():
        if isinstance(ranks, str):
            records.append(without_value("time", "unsupported", ranks, variant=name, phase="total"))
            continue
        records += memory_records(name, ranks)
        records += [
            value("loss", loss, "", variant=name, step=step, rank=rank)
            for rank, own in enumerate(ranks)
            for step, loss in enumerate(own["losses"], 1)
        ]
        error = loss_error(ranks, alone[DDP])
        if error <= allowed:
            correct.append(name)
            continue
        reason = f"losses of two steps are off by {error:.2g}, {allowed:g} is allowed"
        records.append(without_value("time", "failed", reason, variant=name, phase="total"))
    return records, correct


def loss_error(ranks: Any, baseline: Any) -> float:
    """The largest relative difference of a loss on any rank."""
    return across_ranks.max_error(
        abs(found - expected) / abs(expected)
        for own, base in zip(ranks, baseline, strict=True)
        for found, expected in zip(own["losses"], base["losses"], strict=True)
    )


def measure_in_turn(
    point: Point, build: Build, work: RankWork, names: list[str]
) -> tuple[list[Record], dict[str, Any]]:
    """Rounds, waits and timelines of the correct variants."""
    ready = {name: partial(warm_training, name, build, work) for name in names}
    rounds = take_turns(
        {name: timed_step(each) for name, each in ready.items()}, point, work.device
    )
    waits = watch_gathers(ready[OURS], work.device) if OURS in ready else []
    overlap, intervals = overlap_records(ready, work.device)
    whole = work.model()
    records = [
        *round_records(rounds),
        *wait_records(waits),
        *overlap,
        *size_records(whole),
        *work_records(work, whole),
    ]
    return records, {"waits_ms": waits, "intervals_ms": intervals}


@contextmanager
def warm_training(name: str, build: Build, work: RankWork) -> Iterator[Callable[[], Tensor]]:
    """The step of a variant that has taken its first one; the variant exists only inside."""
    release(work.device)
    training = build(name, work)
    training.step(work)
    yield partial(training.step, work)


def timed_step(ready: Ready) -> TimedStep:
    """A training step as one phase: synchronizing within it would prevent overlap."""

    def step(clock: PhaseClock) -> None:
        with ready() as run:
            dist.barrier()  # ranks may take different times to build a variant
            with clock.phase(STEP):
                run()

    return step


def watch_gathers(ready: Ready, device: torch.device) -> list[dict[str, Any]]:
    """How long each block waits for its weights, on every rank."""
    watch = GatherWatch(device)
    with ready() as step:
        for _ in range(WATCHED_STEPS):
            dist.barrier()
            with watch.watching():
                step()
    ranks = across_ranks.gather(watch.medians())
    return [
        {"phase": phase, "layer": layer, "ms": [round(own[phase, layer], 6) for own in ranks]}
        for phase, layer in ranks[0]
    ]


def wait_records(waits: list[dict[str, Any]]) -> list[Record]:
    """All waits of a step together, per phase and rank."""
    return [
        value("gather_wait", sum(row["ms"][rank] for row in mine), "ms", phase=phase, rank=rank)
        for phase in dict.fromkeys(row["phase"] for row in waits)
        for mine in [[row for row in waits if row["phase"] == phase]]
        for rank in range(len(mine[0]["ms"]))
    ]


def size_records(whole: nn.Module) -> list[Record]:
    """How large the model is, and how much of it FSDP shards."""
    sharded = {
        parameter
        for layer in whole.modules()
        if has_matrix_weight(layer)
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim > 1
    }
    return [
        value("parameter_bytes", parameter_bytes(whole), "B"),
        value("sharded_bytes", sum(parameter.nbytes for parameter in sharded), "B"),
    ]
