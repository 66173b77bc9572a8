"""Variants compared fairly: each one is checked first, then all take turns on the clock.

Correctness comes before speed: a variant whose output or gradients are wrong is stopped before it
is timed. The first call of a variant that compiles contains the compilation and is recorded apart.
Kernels are timed by CUDA events (`time_passes`), steps by wall clock (`alternate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import call_ms
from lmlab.chapters.attention.measure.problem import Attend, Problem
from lmlab.chapters.attention.measure.reference import check, errors, reference
from lmlab.chapters.attention.measure.variants import Variants, refuse_unsupported
from lmlab.measure.clock import PhaseClock, measure_steps
from lmlab.measure.kernel_rounds import Call, Prepare, SamplingBudget, measure_in_rounds
from lmlab.measure.records import Label, Record, value
from lmlab.measure.statistics import Measurement

Passes = Mapping[str, Callable[[Attend], Call]]


def sampling_budget(settings: Mapping[str, Any]) -> SamplingBudget:
    """How long each variant is sampled."""
    samples = settings["samples"]
    return SamplingBudget(
        min_samples=min(10, samples), max_samples=samples, time_cap_s=settings["variant_cap_s"]
    )


def try_all(
    variants: Variants, problem: Problem, load: Callable[[str], Attend], device: torch.device
) -> dict[str, Attend]:
    """Run every variant once and check its numbers; returns those that are right."""
    shape = problem.shape
    expected = reference(*problem.inputs, problem.grad_o, is_causal=shape.is_causal)
    attends: dict[str, Attend] = {}
    for name in variants.running:
        with variants.attempt(name):
            refuse_unsupported(name, device, shape.dtype, shape.head_dim)
            attends[name] = load(name)
            _try_out(variants, name, attends[name], problem, expected, device)
    return {name: attends[name] for name in variants.running}


def _try_out(
    variants: Variants,
    name: str,
    attend: Attend,
    problem: Problem,
    expected: Sequence[Tensor],
    device: torch.device,
) -> None:
    found: list[Tensor] = []

    def first_call() -> None:
        output = attend(*problem.inputs)
        found.extend((output, *problem.gradients(output)))

    variants.note(name, "first_call_time", call_ms(first_call, device), "ms")
    check_errors(variants, name, errors(found, expected), problem.shape.dtype)


def check_errors(
    variants: Variants, name: str, found: Mapping[str, float], dtype: torch.dtype
) -> None:
    """Record the errors of a variant; raise if one is larger than the type explains."""
    for tensor, error in found.items():
        variants.note(name, "error", error, "", tensor=tensor)
    check(found, dtype)


def time_passes(
    variants: Variants,
    attends: Mapping[str, Attend],
    passes: Passes,
    device: torch.device,
    budget: SamplingBudget,
) -> None:
    """Time pass after pass; in each, the variants that still run take turns."""
    for phase, prepare in passes.items():
        calls = {name: partial(prepare, attends[name]) for name in variants.running}
        sample_in_turns(variants, calls, device, budget, phase=phase)


def sample_in_turns(
    variants: Variants,
    calls: Mapping[str, Prepare],
    device: torch.device,
    budget: SamplingBudget,
    **labels: Label,
) -> None:
    """Time one call of each variant by CUDA events; one that raises is stopped."""
    times, broken = measure_in_rounds(calls, device=device, budget=budget)
    for name, measurement in times.items():
        variants.time(name, measurement, **labels)
    for name, error in broken.items():
        variants.stop(name, error)


def alternate(
    step: Callable[[PhaseClock], None], settings: Mapping[str, Any], device: torch.device
) -> dict[str, Measurement]:
    """Repeat a step that runs every variant once; times by the name of the phase."""
    return measure_steps(
        step,
        device=device,
        warmup=settings["warmup"],
        steps=settings["steps"],
        time_cap_s=settings["time_cap_s"],
    ).phases


def flop_records(problem: Problem, **labels: Label) -> list[Record]:
    """The arithmetic of each pass."""
    flops = problem.shape.flops()
    return [value("flops", count, "FLOP", phase=phase, **labels) for phase, count in flops.items()]


def thread_record() -> Record:
    """Threads of the host."""
    return value("threads", torch.get_num_threads(), "")
