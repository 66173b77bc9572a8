"""Profile: which kernels a forward pass, a backward pass and an optimizer step are made of.

One point runs three modes in one process: a forward pass without gradient, a forward and backward
pass, a whole train step. First the forward pass is timed by the host's clock with no profiler near,
so that timeline and clock can be held against each other within one process. Then all modes are
warmed, and one run of each is recorded in one capture, told apart by ranges. A profiled run is
never a timing: a profiler stretches the gaps between kernels, and leaves the kernels as they are.

Who records is not this process's choice alone. PyTorch's profiler runs inside it. Nsight Systems
must have been started around it; then this process only opens the capture, and `nsys_result` adds
what the report holds once it exists.

`data` besides what `trace_data` takes from the trace: `tool_note` (why nsys was not used, else
null), `attention_cost` (FLOPs and bytes of attention's parts in one forward pass; null for another
attention, for a model that is not ours, and under autocast, which mixes types), `autocast`, `tf32`
and `threads` as they were set, `tokens_per_step`, `parameters_total`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmlab.chapters.end_to_end.measure import prepare, refuse_if_too_large, time_steps
from lmlab.chapters.profile.trace_data import PHASES_OF_MODE, mode_range, of_trace
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import OWN_ATTENTION, Step, Workload, workload_of
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.identity import find_machine
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.measure.trace.annotate import annotated
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE
from lmlab.measure.trace.ranges import named
from lmlab.measure.trace.recording import capture, profile, under_nsys
from lmlab.model.attention_cost import attention_parts
from lmlab.study.points import Point

TRACES = Path("traces")
TORCH_TRACE = "trace.json.gz"
# Kernels are loaded and memory is held after one step; a second one shows that nothing else is new.
TRAIN_WARMUP = 2

Steps = dict[str, Step]


def measure(point: Point, device: torch.device) -> Outcome:
    """Time the forward pass, then record one run of each mode."""
    workload = workload_of(_with_mode(point, "train_step"))
    if reason := _why_not(workload, point, device):
        raise Unsupported(reason)
    if point.settings["skip_if_too_large"]:
        refuse_if_too_large(workload, device)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        steps = {
            mode: Step(replace(workload, mode=mode), model, device)  # type: ignore[arg-type]
            for mode in PHASES_OF_MODE
        }
        times = time_steps(steps["forward"], _with_mode(point, "forward"), device)
        warm_up(steps, device)
        facts = describe(workload, model)
        recorded = record(steps, model, workload, point, device)
    return Outcome(measurements={"forward": times.phases["forward"]}, data={**facts, **recorded})


def _with_mode(point: Point, mode: str) -> Point:
    """The point as the end-to-end chapter would ask for it."""
    return Point(
        point.chapter, {**point.settings, **point.parameters, "mode": mode}, point.settings
    )


def _why_not(workload: Workload, point: Point, device: torch.device) -> str | None:
    if point.settings["profiler"] == "nsys" and not under_nsys():
        return "profiler = 'nsys', but nsys does not record this process; the workflow starts it so"
    return why_unsupported(workload.precision.name, device)


def warm_up(steps: Steps, device: torch.device) -> None:
    """Run what is to be recorded: the train step covers the other mode with gradients."""
    for _ in range(TRAIN_WARMUP):
        run_mode(steps["train_step"])
        synchronize(device)


def run_mode(step: Step) -> None:
    """One run, each phase in its range; old gradients are dropped before where no phase does."""
    phases = step.phases()
    prepare(step, phases)
    for name, run in phases:
        with named(name):
            run()


def record(
    steps: Steps, model: nn.Module, workload: Workload, point: Point, device: torch.device
) -> dict[str, Any]:
    """One run of each mode under the profiler; empty where nsys keeps the record."""

    def run_all() -> None:
        for mode, step in steps.items():
            with named(mode_range(mode)):
                run_mode(step)
                # The next mode must find the device idle; the wait is part of the picture.
                synchronize(device)

    in_parts = workload.attention == OWN_ATTENTION
    with collector_paused(), annotated(model, attention_in_parts=in_parts):
        if under_nsys():
            capture(run_all, device=device)
            return {}
        keep_as = trace_folder(point) / TORCH_TRACE if point.settings["keep_traces"] else None
        return of_trace(profile(run_all, device=device, keep_as=keep_as))


def trace_folder(point: Point) -> Path:
    """Where the recording of a point is kept, beside `results`."""
    return point.path(TRACES, find_machine().id).with_suffix(".trace")


def describe(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """What ran, and under which settings."""
    return {
        "tool_note": os.environ.get(NSYS_UNAVAILABLE) or None,
        "tokens_per_step": workload.shape.tokens,
        "parameters_total": sum(p.numel() for p in model.parameters()),
        "attention_cost": attention_cost(workload),
        "autocast": workload.precision.autocast,
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "threads": torch.get_num_threads(),
    }


def attention_cost(workload: Workload) -> dict[str, dict[str, int]] | None:
    """FLOPs and bytes of attention's parts, where the cost model knows them."""
    counted = workload.is_ours and workload.attention == OWN_ATTENTION
    if not counted or workload.precision.autocast:
        return None
    costs = attention_parts(workload.shape, element_bytes=workload.precision.dtype.itemsize)
    return {name: asdict(cost) for name, cost in costs.items()}
