"""End to end: how long a model's forward, backward and optimizer take, as a user would feel it.

The order is fixed. The model is built and nothing else runs before the first warm-up step; then
come the timed steps; then peak memory is read; and only then are more steps profiled, because a
profiler slows down what it watches. Their device time (how long the GPU was busy) shows whether a
phase was limited by its kernels or by the host launching them. A few points check device time
against the replay of a CUDA graph.

Records: `time` per phase by wall and device clock, `warmup_time` per phase (samples in order),
`flops` per phase and kind (by the cost model, our model only), `peak_memory` (GPU only), `tokens`,
`parameters`, `parameter_bytes`, `init_time` (building the model; in a cold process also the CUDA
context), and those of `graph_replay` where the point asks for them.
"""

import time
import traceback
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

from lmlab.jobs.outcome import Outcome, Unsupported, without_numbers
from lmlab.jobs.workload import OWN_ATTENTION, Phases, Step, Workload, workload_of
from lmlab.measure.clock import PhaseClock, StepTimes, measure_steps, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes, reset_peak_memory
from lmlab.measure.device_time import device_times, graph_replay_records
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, timed, value, values, without_value
from lmlab.model import cost, footprint
from lmlab.study.points import Point

GIB = 2**30
# Naive attention computes the whole square of scores, the masked half included.
FLOP_CONVENTION: cost.Convention = "full"


def measure(point: Point, device: torch.device) -> Outcome:
    """Time the steps of one point."""
    workload = workload_of(point)
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
        # A CPU has no counter of peak memory; the counter of a GPU is read before profiling.
        peak = {"peak_memory_bytes": peak_memory_bytes(device)}
        records = [
            *step_records(times),
            *workload_records(workload, model),
            *values(peak),
            value("init_time", init_s * 1e3, "ms"),
            *environment_records(),
            *profiled_records(step, device, graph_replay=point.settings.get("graph_replay", False)),
        ]
    return Outcome(measurements=records)


def environment_records() -> list[Record]:
    """Switches and threads that a measurement ran with."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return values({"tf32": tf32, "threads": torch.get_num_threads()})


def step_records(times: StepTimes) -> list[Record]:
    """Timed steps by phase, and the warm-up steps before them, in order."""
    warmup = [
        timed(replace(times.phases[phase], samples_ms=tuple(samples)), "warmup_time", phase=phase)
        for phase, samples in times.warmup_ms.items()
        if samples
    ]
    return [*(timed(found, phase=phase) for phase, found in times.phases.items()), *warmup]


def time_steps(step: Step, point: Point, device: torch.device) -> StepTimes:
    """Warm-up and measured steps through one loop."""
    phases = step.phases()

    def one_step(clock: PhaseClock) -> None:
        prepare(step, phases)
        for name, run in phases:
            with clock.phase(name):
                run()

    asked = {**point.settings, **point.parameters}
    limits = ("warmup", "steps", "max_steps", "interval", "time_cap_s")
    return measure_steps(one_step, device=device, **{k: asked[k] for k in limits if k in asked})


def prepare(step: Step, phases: Phases) -> None:
    """Drop old gradients if no phase of the mode does so, outside any timed phase."""
    if not any(name == "zero_grad" for name, _ in phases):
        step.zero_grad()


def profiled_records(step: Step, device: torch.device, *, graph_replay: bool) -> list[Record]:
    """Device time of additional, profiled steps and times of graph replays; empty on a CPU."""
    phases = step.phases()
    times = device_times(phases, device, prepare=lambda: prepare(step, phases))
    records = [timed(found, phase=phase) for phase, found in times.items()]
    if graph_replay:
        try:
            records += graph_replay_records(phases, device, prepare=step.zero_grad)
        except RuntimeError as error:  # the point keeps its times
            traceback.print_exc()
            found = without_numbers("oom" if is_out_of_memory(error) else "failed", str(error))
            records.append(without_value("graph_replay_time", found.status, str(found.reason)))
    return records


def workload_records(workload: Workload, model: nn.Module) -> list[Record]:
    """What a step consists of: tokens, parameters, and FLOPs for a model the cost model knows."""
    weights = list(model.parameters())
    records = [
        value("tokens", workload.shape.tokens, ""),
        value("parameters", sum(p.numel() for p in weights), ""),
        value("parameter_bytes", sum(p.nbytes for p in weights), "B"),
    ]
    if not workload.is_ours:
        return records
    flops = cost.flops(workload.shape, mode=workload.mode, convention=FLOP_CONVENTION)
    return records + [
        value("flops", count, "FLOP", phase=phase, kind=kind)
        for phase, kinds in flops.items()
        for kind, count in kinds.items()
    ]


def refuse_if_too_large(workload: Workload, device: torch.device) -> None:
    """Raise `Unsupported` if the predicted peak exceeds the free memory."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return  # the cost model knows nothing of it, so it is tried
    precision: Any = workload.precision.name
    where: Any = device.type
    needed = footprint.memory(workload.shape, precision, workload.mode, device=where).peak
    free = free_memory_bytes(device)
    if needed > free:
        raise Unsupported(f"needs about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB free")


def free_memory_bytes(device: torch.device) -> int:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
