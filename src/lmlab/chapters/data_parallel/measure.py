"""Data parallel: what averaging gradients costs, variant by variant, and what overlap hides of it.

All variants run in one job on the same ranks. The order is fixed. A size is chosen that the link
can carry. The gradients of every variant are compared with plain averaging; a variant that is wrong
gets no time. Then the variants take turns, round by round. Then the phases of a step without
communication are timed, because backward is all that gradients can hide behind. Finally one step of
each variant is profiled: last, since a profiler slows down the program.

Records, besides those of `autosize` and `rank_records`: `phase_time` per phase of a step without
communication; `gradient_error`, `messages`, `message_bytes` and `largest_message` per variant;
`peak_memory` of a step per variant and rank.
`data.intervals_ms`: rank 0's timeline per variant.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lmlab.chapters.data_parallel.variants import (
    ALONE,
    TOLERANCE,
    Variant,
    gradient_error,
    mean_gradients,
    wrappers,
)
from lmlab.jobs.autosize import choose
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_records import overlap_records, round_records, take_turns, work_records
from lmlab.jobs.rank_work import Candidate, RankWork, candidates, second_step_s
from lmlab.measure import across_ranks
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, timed, value, without_value
from lmlab.parallel.ddp_flat import FlatDDP
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Time every variant on these ranks; called on each of them."""
    sizes = candidates(point, device)
    with tf32_allowed(sizes[0].workload.precision.tf32):
        choice = choose(
            sizes,
            device,
            limit_s=point.settings["step_limit_s"],
            messages=1,
            try_step=lambda candidate: trial_s(candidate, device),
        )
        work = RankWork(choice.candidate.workload, device)
        model = work.model()
        variants = make_variants(point, work, model)
        checks = check(variants, work, model)
        correct = {n: variant for n, variant in variants.items() if checks[n]["status"] == "ok"}
        timed_steps = {name: variant.timed for name, variant in correct.items()}
        rounds = take_turns(timed_steps, point, device)
        phases = take_turns({ALONE: variants[ALONE].timed_in_phases}, point, device)
        ready = {name: variant.ready for name, variant in correct.items()}
        overlap, intervals = overlap_records(ready, device)
        records = [
            *round_records(rounds),
            *(c for name, c in checks.items() if name != ALONE),
            *(
                timed(phases.slowest(ALONE, phase), "phase_time", phase=phase)
                for phase in phases.samples_ms[ALONE]
            ),
            *(r for name, variant in variants.items() for r in variant.message_records(name)),
            *(r for name, variant in correct.items() for r in variant.memory_records(name)),
            *overlap,
            *choice.records("time"),
            *work_records(work, model),
        ]
    return Outcome(measurements=records, data={"intervals_ms": intervals})


def trial_s(candidate: Candidate, device: torch.device) -> float:
    """Seconds of forward, backward and one large message."""
    work = RankWork(candidate.workload, device)
    model = FlatDDP(work.model())

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        work.loss(model).backward()
        model.finish_gradient_synchronization()

    return second_step_s(step, device)


def make_variants(point: Point, work: RankWork, model: nn.Module) -> dict[str, Variant]:
    """All variants around one set of weights."""
    optimizer = work.adamw(model.parameters())
    asked = wrappers(point.settings["bucket_sizes_mb"], point.settings["torch_bucket_mb"])
    return {name: Variant(work, model, optimizer, wrap) for name, wrap in asked.items()}


def check(variants: Mapping[str, Variant], work: RankWork, model: nn.Module) -> dict[str, Record]:
    """Loss and gradients of every variant against plain averaging: the error on the worst rank, or
    a failed time."""
    expected_loss, expected = mean_gradients(work, model)
    allowed = TOLERANCE[work.workload.precision.name]
    found = {}
    for name, variant in variants.items():
        with variant.allocated():
            loss_error = abs(float(variant.backward()) - expected_loss) / abs(expected_loss)
            own_error = 0.0 if name == ALONE else gradient_error(variant.gradients(), expected)
        error = across_ranks.max_over_ranks(across_ranks.max_error([loss_error, own_error]))
        if error <= allowed:
            found[name] = value("gradient_error", error, "", variant=name)
        else:
            reason = f"gradients are off by {error:.2g} of their norm, {allowed:g} is allowed"
            found[name] = without_value("time", "failed", reason, variant=name, phase="total")
    return found
