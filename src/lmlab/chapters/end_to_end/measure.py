"""End to end: how long a model's forward, backward and optimizer take, as a user would feel it.

The order is fixed. The model is made and nothing else is run, so the first warm-up step is the
first thing that the device does with it; then the measured steps; then peak memory is read, which
the timed steps alone have set; and only then is one more step profiled, phase by phase, since a
profiler slows down what it watches. The GPU-busy share that comes of it tells whether a phase took
as long as its kernels or as long as the host needed to launch them.

`data`: `warmup_samples_ms` (the unmeasured steps, in order), `tokens_per_step`, `flops` of the
phases that the mode runs, by the cost model (null for a model that is not ours, which it does not
describe), `parameters_total`, `parameters_bytes`, `gpu_busy_ms` and `peak_memory_bytes` (null on a
CPU), `init_s` (making the model; in a cold process the CUDA context too), `tf32` and `threads` as
they were set while the clock ran.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from torch import nn

from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import OWN_ATTENTION, Phases, Step, Workload, workload_of
from lmlab.measure.clock import PhaseClock, StepTimes, measure_steps, synchronize
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.gpu_busy import busy_ms
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.model import cost, footprint
from lmlab.study.points import Point

GIB = 2**30
# Naive attention computes the whole square of scores, the masked half included.
FLOP_CONVENTION: cost.Convention = "full"


def measure(point: Point, device: torch.device) -> Outcome:
    """Time the steps of one point."""
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    if point.settings["skip_if_too_large"]:
        refuse_if_too_large(workload, device)
    with tf32_allowed(workload.precision.tf32):
        began_s = time.perf_counter()
        model = workload.build(device)
        synchronize(device)
        init_s = time.perf_counter() - began_s
        reset_peak_memory(device)
        step = Step(workload, model, device)
        times = time_steps(step, point, device)
        data = {
            **describe(workload, model, times),
            "peak_memory_bytes": peak_memory_bytes(device),
            "init_s": init_s,
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "threads": torch.get_num_threads(),
            "gpu_busy_ms": profile_phases(step, device),
        }
    return Outcome(measurements=times.phases, data=data)


def time_steps(step: Step, point: Point, device: torch.device) -> StepTimes:
    """Warm-up and measured steps through one loop."""
    phases = step.phases()

    def one_step(clock: PhaseClock) -> None:
        prepare(step, phases)
        for name, run in phases:
            with clock.phase(name):
                run()

    return measure_steps(
        one_step,
        device=device,
        warmup=int(point.parameters["warmup"]),
        steps=point.settings["steps"],
        time_cap_s=point.settings["time_cap_s"],
    )


def prepare(step: Step, phases: Phases) -> None:
    """Drop old gradients where no phase of the mode does: that belongs to no timed part of it."""
    if not any(name == "zero_grad" for name, _ in phases):
        step.zero_grad()


def profile_phases(step: Step, device: torch.device) -> dict[str, float] | None:
    """Milliseconds of GPU work in each phase of one more step; None on a CPU."""
    if device.type != "cuda":
        return None
    phases = step.phases()
    prepare(step, phases)
    return {name: busy_ms(run, device) or 0.0 for name, run in phases}


def describe(workload: Workload, model: nn.Module, times: StepTimes) -> dict[str, Any]:
    """What the step consists of: tokens, parameters, operations."""
    flops = cost.flops(workload.shape, mode=workload.mode, convention=FLOP_CONVENTION)
    return {
        "warmup_samples_ms": times.warmup_ms,
        "tokens_per_step": workload.shape.tokens,
        "flops": flops if workload.is_ours else None,
        "flop_convention": FLOP_CONVENTION,
        "parameters_total": sum(p.numel() for p in model.parameters()),
        "parameters_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def refuse_if_too_large(workload: Workload, device: torch.device) -> None:
    """Raise `Unsupported` for a point that the cost model puts over the free memory."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return  # the cost model knows nothing of it, so it is tried
    needed = footprint.memory(
        workload.shape,
        workload.precision.name,  # type: ignore[arg-type]
        workload.mode,
        device="cuda" if device.type == "cuda" else "cpu",
    ).peak
    free = free_memory_bytes(device)
    if needed > free:
        raise Unsupported(f"needs about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB free")


def free_memory_bytes(device: torch.device) -> int:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
