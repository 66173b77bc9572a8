"""Data parallel: what averaging gradients costs, variant by variant, and what overlap hides of it.

One job, the same ranks, every variant an arm (`data_parallel_arms`). The order is fixed: a size is
chosen that the link can carry; every arm's gradients are checked against plain averaging, and an
arm that is off gets no time; then rounds, in which arms take turns; then the phases of a step that
talks to nobody, since how long backward takes is how much there is to hide behind; and at last one
step of each arm under the profiler, which slows down what it watches.

`data`: `choice` of the size with what was left out, `parameters_total`, `gradient_bytes`,
`tokens_per_rank`, `arms` by name: `status` and `reason`, `ranks_ms` (a list of step times a rank),
`gradient_error`, number and bytes of messages, and `trace` (sums, shares, reduced intervals of rank
0); `phases_ms` of a step without communication, slowest rank; `torch_bucket_mb`, `tf32`, `threads`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmlab.chapters.data_parallel.variants import (
    ALONE,
    TOLERANCE,
    Arm,
    SharedOptimizer,
    describe_failure,
    gradient_error,
    mean_gradients,
    twin,
    wrappers,
)
from lmlab.jobs.autosize import Choice, choose
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import Candidate, RankWork, candidates, parameter_bytes
from lmlab.measure import across_ranks
from lmlab.measure.clock import PhaseClock, synchronize
from lmlab.measure.overlap import profile_overlap, start_profiler
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.rounds import Rounds, interleave
from lmlab.parallel.ddp_flat import FlatDDP
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Time every variant on these ranks; called on each of them."""
    sizes = candidates(point, device)
    names = wrappers(point.settings["bucket_sizes_mb"], point.settings["torch_bucket_mb"])
    with tf32_allowed(sizes[0].workload.precision.tf32):
        choice = choose(
            sizes,
            device,
            limit_s=point.settings["step_limit_s"],
            copies=len(names),  # gradients of every arm
            messages=1,
            try_step=lambda candidate: trial_s(candidate, device),
        )
        work = RankWork(choice.candidate.workload, device)
        model = work.model()
        arms = make_arms(point, work, model)
        faults = check(arms, work, model)
        sound = {name: arm for name, arm in arms.items() if "reason" not in faults[name]}
        rounds = time_arms(sound, point, device)
        phases = time_alone(arms[ALONE], point, device)
        traces = trace_arms(sound, device)
        data = {
            **describe(point, choice, work, model),
            "phases_ms": {
                name: list(phases.slowest(ALONE, name).samples_ms)
                for name in phases.samples_ms[ALONE]
            },
            "arms": {
                name: entry(name, arm, faults[name], rounds, traces) for name, arm in arms.items()
            },
        }
    return Outcome(measurements={name: rounds.slowest(name) for name in sound}, data=data)


def trial_s(candidate: Candidate, device: torch.device) -> float:
    """Seconds of forward, backward and one large message, the second time they run."""
    work = RankWork(candidate.workload, device)
    model = FlatDDP(work.model())
    seconds = 0.0
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        synchronize(device)
        began = time.perf_counter()
        work.loss(model).backward()
        model.finish_gradient_synchronization()
        synchronize(device)
        seconds = time.perf_counter() - began
    return seconds


def make_arms(point: Point, work: RankWork, model: nn.Module) -> dict[str, Arm]:
    """All arms around one set of weights."""
    parameters = list(model.parameters())
    optimizer = SharedOptimizer(parameters, work.adamw(model.parameters()))
    asked = wrappers(point.settings["bucket_sizes_mb"], point.settings["torch_bucket_mb"])
    return {name: Arm(name, work, twin(model), optimizer, wrap) for name, wrap in asked.items()}


def check(arms: Mapping[str, Arm], work: RankWork, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Loss and gradients of every arm against plain averaging, the worst rank counted."""
    expected_loss, expected = mean_gradients(work, model)
    tolerance = TOLERANCE[work.workload.precision.name]
    found: dict[str, dict[str, Any]] = {}
    for name, arm in arms.items():
        loss_error = abs(arm.backward() - expected_loss) / abs(expected_loss)
        own_error = 0.0 if name == ALONE else gradient_error(arm.gradients(), expected)
        error = across_ranks.max_over_ranks(across_ranks.max_error([loss_error, own_error]))
        found[name] = {"gradient_error": None if name == ALONE else error}
        if error > tolerance:
            found[name] = describe_failure(error, tolerance)
    return found


def time_arms(arms: Mapping[str, Arm], point: Point, device: torch.device) -> Rounds:
    """Rounds of all arms."""
    return interleave(
        {name: arm.timed for name, arm in arms.items()},
        device=device,
        warmup=point.settings["warmup"],
        rounds=point.settings["rounds"],
        time_cap_s=point.settings["time_cap_s"],
    )


def time_alone(arm: Arm, point: Point, device: torch.device) -> Rounds:
    """The phases of a step that sends nothing, on all ranks at once."""

    def one(clock: PhaseClock) -> None:
        arm.timed_in_phases(clock)

    return interleave(
        {ALONE: one},
        device=device,
        warmup=1,
        rounds=point.settings["rounds"],
        time_cap_s=point.settings["time_cap_s"],
    )


def trace_arms(arms: Mapping[str, Arm], device: torch.device) -> dict[str, dict[str, Any]]:
    """One profiled step of every arm: rank 0's intervals, everybody's shares."""
    start_profiler(device)
    traces = {}
    for name, arm in arms.items():
        dist.barrier()
        overlap = profile_overlap(arm.step, device)
        traces[name] = {
            **overlap.to_json(),
            "overlapped_share_by_rank": across_ranks.gather(overlap.overlapped_share),
        }
    return traces


def describe(point: Point, choice: Choice, work: RankWork, model: nn.Module) -> dict[str, Any]:
    """What was measured, on whom."""
    return {
        "choice": choice.to_json(),
        "step_limit_s": point.settings["step_limit_s"],
        "parameters_total": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": parameter_bytes(model),
        "tokens_per_rank": work.workload.shape.tokens,
        "torch_bucket_mb": point.settings["torch_bucket_mb"],
        "profiler": f"torch profiler {torch.__version__}",
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "threads": torch.get_num_threads(),
    }


def entry(
    name: str, arm: Arm, fault: Mapping[str, Any], rounds: Rounds, traces: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a result keeps of one arm."""
    if "reason" in fault:
        return {**fault, **arm.messages()}
    return {
        "status": "ok",
        "reason": None,
        **fault,
        **arm.messages(),
        "ranks_ms": rounds.samples_ms[name]["total"],
        "trace": traces[name],
    }
