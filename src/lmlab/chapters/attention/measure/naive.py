"""Naive attention, eager and compiled: time of forward and backward, and what it holds in memory.

Both arms take turns in one loop, forward then backward, by the host's clock: what a user waits for.
Before that each arm runs once for its numbers (they are checked), once for what forward leaves in
memory before backward begins, and for the peak of both together. The compiled arm's first forward
and backward are timed apart: they contain the compilation, with caches that start empty.

`data`: `arms`, each with `errors`, `first_call_s`, `forward_peak_memory_bytes`,
`memory_before_backward_bytes` and `peak_memory_bytes` (null on a CPU), `saved_bytes` (eager: what
autograd keeps beyond the inputs) or `attention_replaced` (compiled: how often fused attention was
put in place of the formula); `account` of `forward`, `before_backward` and `peak`: the tensors that
the formula says are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.attention import registry
from lmlab.chapters.attention.measure import account
from lmlab.chapters.attention.measure.compiling import COMPILES, attention_replaced, compiler_for
from lmlab.chapters.attention.measure.problem import Attend, Problem, shape_of
from lmlab.chapters.attention.measure.race import try_out
from lmlab.chapters.attention.measure.reference import reference
from lmlab.chapters.attention.measure.variants import Arms, refuse_unsupported
from lmlab.jobs.outcome import Outcome
from lmlab.measure.clock import PhaseClock, measure_steps
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.statistics import Measurement
from lmlab.study.points import Point

MOMENTS = ("forward_peak_memory_bytes", "memory_before_backward_bytes", "peak_memory_bytes")


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure one shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    arms = Arms(settings["variants"], device)
    with tf32_allowed(shape.tf32), compiler_for(settings["variants"], cold=True):
        problem = Problem(shape, device, settings["seed"])
        right = reference(*problem.inputs, problem.grad_o, is_causal=shape.is_causal)
        attends = {name: _attend(name, shape.is_causal) for name in settings["variants"]}
        for name in settings["variants"]:
            with arms.attempt(name):
                refuse_unsupported(name, device, shape.dtype, shape.head_dim)
                try_out(name, attends[name], problem, right, arms, device)
                try_memory(name, attends[name], problem, arms, device)
        del right
        running = {name: attends[name] for name in arms.running}
        measurements = time_passes(running, problem, device, settings) if running else {}
    data = {
        "flops": shape.flops(),
        "account": {
            "forward": account.in_forward(shape),
            "before_backward": account.before_backward(shape),
            "peak": account.at_peak(shape),
        },
        "threads": torch.get_num_threads(),
    }
    return arms.outcome(measurements, data)


def _attend(name: str, is_causal: bool) -> Attend:
    return partial(registry.load(name), is_causal=is_causal)


def try_memory(
    name: str, attend: Attend, problem: Problem, arms: Arms, device: torch.device
) -> None:
    """Note what an arm holds in memory, before any time is taken."""
    arms.note(name, **memory(attend, problem, device))
    if name in COMPILES:
        arms.note(name, attention_replaced=attention_replaced())
    else:  # hooks on what is saved would make the compiler compile anew
        arms.note(name, saved_bytes=account.saved_bytes(attend, problem))


def memory(attend: Attend, problem: Problem, device: torch.device) -> dict[str, int | None]:
    """The most that forward holds, what it leaves, and the most of all; null on a CPU."""
    if device.type != "cuda":
        return dict.fromkeys(MOMENTS)
    torch.cuda.synchronize(device)
    others = int(torch.cuda.memory_allocated(device)) - _bytes(*problem.inputs, problem.grad_o)
    reset_peak_memory(device)
    output = attend(*problem.inputs)
    forward = peak_memory_bytes(device) or 0
    held = int(torch.cuda.memory_allocated(device))
    problem.gradients(output)
    found = forward, held, peak_memory_bytes(device) or 0
    return {name: count - others for name, count in zip(MOMENTS, found, strict=True)}


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def time_passes(
    attends: Mapping[str, Attend],
    problem: Problem,
    device: torch.device,
    settings: Mapping[str, Any],
) -> dict[str, Measurement]:
    """Forward and backward of each arm in turn, as often as the study asks for."""

    def one_step(clock: PhaseClock) -> None:
        for name, attend in attends.items():
            with clock.phase(f"{name}.forward"):
                output = attend(*problem.inputs)
            with clock.phase(f"{name}.backward"):
                gradients = problem.gradients(output)
            del output, gradients

    return measure_steps(
        one_step,
        device=device,
        warmup=settings["warmup"],
        steps=settings["steps"],
        time_cap_s=settings["time_cap_s"],
    ).phases
