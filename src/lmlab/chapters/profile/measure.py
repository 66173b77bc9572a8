"""Profile: which kernels a forward pass, a backward pass and an optimizer step are made of.

The forward pass is timed by the wall clock without a profiler; then all modes are warmed up and one
run of each (forward without gradient, forward and backward, train step) is recorded in one capture,
each in its own range. PyTorch's profiler runs inside this process. Nsight Systems must be started
around it; this process then only opens the capture, and `trace_data` adds the report later.

A mode that runs out of memory gets a record with the reason; the other modes are still recorded.

Records besides those of `trace_data`: `time` of the forward pass, `matmul_flops` per mode (our
model only), `flops` and `traffic` per part of attention by the cost model (with naive attention
only, and not under autocast, which mixes types), `tokens`, `parameters`, `autocast`, `tf32`,
`threads`, and `profiler_note`, why nsys was not used.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lmlab.chapters.end_to_end.measure import (
    environment_records,
    prepare,
    refuse_if_too_large,
    time_steps,
)
from lmlab.chapters.profile.trace_data import PHASES_OF_MODE, TOTAL, Reduced, mode_range, of_trace
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.run import memory_reason
from lmlab.jobs.workload import OWN_ATTENTION, Step, Workload, workload_of
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import is_out_of_memory
from lmlab.measure.identity import find_machine
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, timed, value, without_value
from lmlab.measure.time_spent import measuring
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE
from lmlab.measure.trace.ranges import annotated, named
from lmlab.measure.trace.recording import capture, profile, under_nsys
from lmlab.model import cost
from lmlab.model.cost import attention_parts
from lmlab.study.points import Point

TRACES = Path("traces")
# The first run loads and allocates, the second finds everything there.
WARMUP = 2

Steps = dict[str, Step]


def measure(point: Point, device: torch.device) -> Outcome:
    """Time the forward pass, then record one run of each mode."""
    workload = workload_of(point, mode="train_step")
    if point.settings["profiler"] == "nsys" and not under_nsys():
        raise Unsupported(
            "profiler = 'nsys', but nsys is not recording this process; use the workflow"
        )
    if point.settings["skip_if_too_large"]:
        refuse_if_too_large(workload, device)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        steps = {
            mode: Step(replace(workload, mode=mode), model, device)  # type: ignore[arg-type]
            for mode in PHASES_OF_MODE
        }
        times = time_steps(steps["forward"], point, device)
        too_large = warm_up(steps, device)
        measured = [
            timed(times.phases["forward"], phase="forward"),
            *workload_records(workload, model),
            *environment_records(),
            *too_large.values(),
        ]
        fitting = {mode: step for mode, step in steps.items() if mode not in too_large}
        recorded, data = record(fitting, model, workload, point, device)
    return Outcome(measurements=[*measured, *recorded], data=data)


def warm_up(steps: Steps, device: torch.device) -> dict[str, Record]:
    """Warm up the largest mode that fits; returns an out-of-memory record per larger mode."""
    too_large: dict[str, Record] = {}
    for mode, step in reversed(steps.items()):
        try:
            for _ in range(WARMUP):
                run_mode(step)
                synchronize(device)
            return too_large
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = memory_reason(error, device)
            too_large[mode] = without_value("span_time", "oom", reason, mode=mode, phase=TOTAL)
        # The error, whose traceback kept tensors alive, is gone by now.
        vars(step)["_loss"] = None
        step.zero_grad()
        step._optimizer.state.clear()
        torch.cuda.empty_cache()
    return too_large


def run_mode(step: Step) -> None:
    """Run each phase of a mode in its own range, after dropping gradients if no phase does so."""
    phases = step.phases()
    prepare(step, phases)
    for name, run in phases:
        with named(name):
            run()


@measuring()
def record(
    steps: Steps, model: nn.Module, workload: Workload, point: Point, device: torch.device
) -> Reduced:
    """Run each mode once under the profiler; under nsys, records and data are added later."""

    def run_all() -> None:
        for mode, step in steps.items():
            with named(mode_range(mode)):
                run_mode(step)
                # The next mode must find the device idle; the wait is part of the recording.
                synchronize(device)

    in_parts = workload.attention == OWN_ATTENTION
    with collector_paused(), annotated(model, attention_in_parts=in_parts):
        if under_nsys():
            capture(run_all, device=device)
            return [], {}
        keep_as = trace_folder(point) / "trace.json.gz" if point.settings["keep_traces"] else None
        return of_trace(profile(run_all, device=device, keep_as=keep_as))


def trace_folder(point: Point) -> Path:
    """Where the recording of a point is kept, next to `results`."""
    return point.path(TRACES, find_machine().id).with_suffix(".trace")


def workload_records(workload: Workload, model: nn.Module) -> list[Record]:
    """Tokens, parameters, matmul FLOPs and, where known, the cost of attention's parts."""
    records = [
        value("tokens", workload.shape.tokens, ""),
        value("parameters", sum(p.numel() for p in model.parameters()), ""),
        value("autocast", workload.precision.autocast, ""),
    ]
    if note := os.environ.get(NSYS_UNAVAILABLE):
        records.append(value("profiler_note", note, ""))
    if not workload.is_ours:
        return records
    for mode in PHASES_OF_MODE:
        phases = cost.flops(workload.shape, mode=mode)  # type: ignore[arg-type]
        matmuls = sum(phase["matmul"] for phase in phases.values())
        records.append(value("matmul_flops", matmuls, "FLOP", mode=mode))
    if workload.attention != OWN_ATTENTION or workload.precision.autocast:
        return records
    costs = attention_parts(workload.shape, element_bytes=workload.precision.dtype.itemsize)
    for part, work in costs.items():
        records.append(value("flops", work.flops, "FLOP", part=part))
        records.append(value("traffic", work.bytes, "B", part=part))
    return records
