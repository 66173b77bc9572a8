"""The modes of one size, context and precision, recorded one after the other in one process."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmlab.chapters.memory.measure.records import (
    ModeResult,
    accounting_records,
    environment_records,
    mode_records,
    outcome_of,
    timelines,
)
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.workload import OWN_ATTENTION, Phases, Step, Workload, workload_of
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes, reset_peak_memory
from lmlab.measure.identity import find_machine
from lmlab.measure.memory.accounting import account
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.memory.recorder import KnownTensor, Recording, record
from lmlab.measure.memory.summary import summarize
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import value
from lmlab.model import peak
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point

GIB = 2**30
FP32_BYTES = 4
SNAPSHOTS = Path("snapshots")


class Mode(NamedTuple):
    """One way to run the model, as phases of a step."""

    name: peak.PeakMode
    phases: Callable[[Step], Phases]
    keeps_graph: bool = True
    keeps_state: bool = False
    """Whether the optimizer's state lasts from one step to the next."""


def _training(step: Step) -> Phases:
    return [phase for phase in step.phases() if phase[0] != "zero_grad"]


MODES = (
    Mode("forward", lambda step: [("forward", step.infer)], keeps_graph=False),
    Mode("forward_graph", lambda step: [("forward", step.forward)]),
    Mode("train_step", _training, keeps_state=True),
)


def measure_modes(point: Point, device: torch.device) -> Outcome:
    """All modes of one size, context and precision."""
    workload = workload_for(point)
    # What exists now is never garbage, and searching it repeatedly takes longer than a step.
    with tf32_allowed(workload.precision.tf32), collector_paused():
        torch.empty(1, device=device)  # creates the device's context
        empty_allocator(device)
        before = account(device)
        model = workload.build(device)
        empty_allocator(device)
        modes = [_mode(mode, workload, model, point, device) for mode in MODES]
        records = [
            value("stream_bytes", stream_bytes(workload.shape), "B"),
            value("parameters", sum(p.numel() for p in model.parameters()), ""),
            *environment_records(),
            *accounting_records(before, stage="before"),
            *(record for mode in modes for record in mode_records(mode)),
        ]
    endings = [(mode.mode, mode.status, mode.reason) for mode in modes]
    return outcome_of(endings, records, timelines(modes))


def workload_for(point: Point) -> Workload:
    """The workload of a point that names no mode: its steps are train steps, or parts of one."""
    return workload_of(
        Point(point.chapter, {**point.parameters, "mode": "train_step"}, point.settings)
    )


def stream_bytes(shape: ModelShape) -> int:
    """One fp32 tensor of the residual stream: batch x context x d_model."""
    return FP32_BYTES * shape.tokens * shape.d_model


def empty_allocator(device: torch.device) -> None:
    """Free all unused memory and reset the peak."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak_memory(device)


def _mode(
    mode: Mode, workload: Workload, model: nn.Module, point: Point, device: torch.device
) -> ModeResult:
    predicted = prediction(workload, mode.name, device)
    if point.settings["skip_if_too_large"] and (reason := too_large(predicted, device)):
        return ModeResult(mode=mode.name, predicted=predicted, status="unsupported", reason=reason)
    try:
        step = Step(workload, model, device)
        unrecorded = _warm_up(step, mode, device)
        if not mode.keeps_state:
            step = Step(workload, model, device)  # drops the warm-up's graph
        step.zero_grad()
        empty_allocator(device)
        recording = record(
            mode.phases(step),
            device=device,
            identify=lambda: known_tensors(model, step),
            observer=Observer({address_of(p): name for name, p in model.named_parameters()}),
        )
        accounting = account(device)
        summary = _summary(recording, mode, workload.shape)
        asked = _asked(recording)
        return ModeResult(
            mode=mode.name,
            predicted=predicted,
            status="ok" if recording.out_of_memory is None else "oom",
            reason=_reason(recording, summary, asked),
            summary=summary,
            counters={
                "allocator_peak": peak_memory_bytes(device),
                "unrecorded_peak": unrecorded,
                "asked": asked,
            },
            accounting=accounting,
            snapshot=save_snapshot(recording, point, mode.name),
        )
    finally:
        model.zero_grad(set_to_none=True)
        empty_allocator(device)


def _warm_up(step: Step, mode: Mode, device: torch.device) -> int | None:
    """One step unrecorded; its peak, or None on a CPU.

    If it runs out of memory, so does the recorded one after it, which then says why.
    """
    try:
        for _, run in mode.phases(step):
            run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_graph(step)
        return None
    synchronize(device)
    return peak_memory_bytes(device)


def drop_graph(step: Step) -> None:
    """Free what a forward pass left for a backward pass that never finished."""
    vars(step)["_loss"] = None


def known_tensors(model: nn.Module, step: Step) -> dict[int, KnownTensor]:
    """Tensors at known addresses now: the model, its gradients, optimizer state, batch."""
    return {
        address_of(tensor): KnownTensor(
            category=category, name=name, size=tensor.untyped_storage().nbytes()
        )
        for category, name, tensor in _named_tensors(model, step)
    }


def _named_tensors(model: nn.Module, step: Step) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("other", name, vars(step)[f"_{name}"]) for name in ("tokens", "targets"))
    yield from (("other", name, buffer) for name, buffer in model.named_buffers())
    state = step._optimizer.state
    for name, parameter in model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", parameter.grad
        for key, tensor in state.get(parameter, {}).items():
            if isinstance(tensor, Tensor):
                yield "optimizer_state", f"{key} of {name}", tensor


def is_predictable(workload: Workload) -> bool:
    """Whether the cost model describes this model and attention."""
    return workload.is_ours and workload.attention == OWN_ATTENTION


def prediction(workload: Workload, mode: peak.PeakMode, device: torch.device) -> peak.Stage | None:
    """The cost model's peak; None for what it does not describe."""
    if not is_predictable(workload):
        return None
    precision: Any = workload.precision.name
    where: Any = device.type
    return peak.predicted_peak(workload.shape, precision, mode, device=where)


def too_large(predicted: peak.Stage | None, device: torch.device) -> str | None:
    """Why a mode is not tried; a CPU can swap, so only a GPU refuses."""
    if predicted is None or device.type != "cuda":
        return None
    needed = predicted.parts.total
    free = int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    if needed <= free:
        return None
    return f"needs about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB free"


def _summary(recording: Recording, mode: Mode, shape: ModelShape) -> dict[str, Any]:
    return summarize(
        recording,
        keeps_graph=mode.keeps_graph,
        stream_bytes=stream_bytes(shape),
        score_shape=(shape.batch, shape.num_heads, shape.context, shape.context),
    )


def _asked(recording: Recording) -> int | None:
    """The allocation that failed; a failure outside the allocator has none."""
    failures = [event.size for event in recording.history.events if event.kind == "oom"]
    return failures[-1] if failures and recording.out_of_memory is not None else None


def _reason(recording: Recording, summary: Mapping[str, Any], asked: int | None) -> str | None:
    if recording.out_of_memory is None:
        return None
    return needs_more(asked, sum(summary["live_categories"].values()), recording.phases[-1].name)


def needs_more(asked: int | None, used: int | None, what: str) -> str:
    """Why memory ran out: the request that failed, and what tensors held then."""
    more = f"{asked / GIB:.1f} GiB more" if asked else "more memory"
    return f"{what} needs {more}" + (f" with {used / GIB:.1f} GiB in use" if used else "")


def save_snapshot(recording: Recording, point: Point, mode: str) -> str | None:
    """The snapshot as torch's viewer opens it: where asked for, and always when memory ran out."""
    wanted = point.settings["keep_snapshots"] or recording.out_of_memory is not None
    if recording.snapshot is None or not wanted:
        return None
    path = point.path(SNAPSHOTS, find_machine().id).with_suffix("") / f"{mode}.pickle"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(recording.snapshot, file)
    return path.as_posix()
