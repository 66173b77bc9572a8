"""The modes of one point of the memory chapter, recorded one after the other in one process."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from lmlab.model import peak
from lmlab.study.points import Point

GIB = 2**30
STREAM_ELEMENT_BYTES = 4
SNAPSHOTS = Path("snapshots")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to run the model, as phases of a step."""

    name: peak.PeakMode
    keeps_graph: bool
    keeps_state: bool
    """Whether the optimizer's state lasts from one step to the next."""
    phases: Callable[[Step], Phases]


MODES = (
    Mode(
        name="forward",
        keeps_graph=False,
        keeps_state=False,
        phases=lambda step: [("forward", step.infer)],
    ),
    Mode(
        name="forward_graph",
        keeps_graph=True,
        keeps_state=False,
        phases=lambda step: [("forward", step.forward)],
    ),
    Mode(
        name="train_step",
        keeps_graph=True,
        keeps_state=True,
        phases=lambda step: [phase for phase in step.phases() if phase[0] != "zero_grad"],
    ),
)


def measure_modes(point: Point, device: torch.device) -> Outcome:
    """All modes of one size, context and precision."""
    workload = workload_for(point)
    # What is there now is never garbage; to search it again and again takes longer than a step.
    with tf32_allowed(workload.precision.tf32), collector_paused():
        torch.empty(1, device=device)  # wakes the device, so that its context is there
        empty_allocator(device)
        tf32 = torch.get_float32_matmul_precision() != "highest"
        before = account(device)
        model = workload.build(device)
        empty_allocator(device)
        modes = {str(mode.name): _mode(mode, workload, model, point, device) for mode in MODES}
    shape = workload.shape
    data = {
        "modes": modes,
        "before": before,
        "stream_bytes": STREAM_ELEMENT_BYTES * shape.tokens * shape.d_model,
        "parameters_total": sum(parameter.numel() for parameter in model.parameters()),
        "tf32": tf32,
        "threads": torch.get_num_threads(),
        "recorded_with": "allocator history" if device.type == "cuda" else "profiler events",
    }
    return _outcome(modes, data)


def workload_for(point: Point) -> Workload:
    """The workload of a point that names no mode: its steps are train steps, or parts of one."""
    return workload_of(
        Point(point.chapter, {**point.parameters, "mode": "train_step"}, point.settings)
    )


def empty_allocator(device: torch.device) -> None:
    """Give back everything that nobody uses and start counting anew."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak_memory(device)


def _outcome(modes: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any]) -> Outcome:
    """The point has numbers if one of its modes has."""
    if any(mode["status"] == "ok" for mode in modes.values()):
        return Outcome(data=data)
    name, worst = next(iter(modes.items()))
    return Outcome(status=worst["status"], reason=f"{name}: {worst['reason']}", data=data)


def _mode(
    mode: Mode, workload: Workload, model: nn.Module, point: Point, device: torch.device
) -> dict[str, Any]:
    predicted = prediction(workload, mode.name, device)
    if point.settings["skip_if_too_large"] and (reason := _too_large(predicted, device)):
        return {"status": "unsupported", "reason": reason, "predicted": predicted}
    try:
        return {**_recorded(mode, workload, model, point, device), "predicted": predicted}
    finally:
        model.zero_grad(set_to_none=True)
        empty_allocator(device)


def _recorded(
    mode: Mode, workload: Workload, model: nn.Module, point: Point, device: torch.device
) -> dict[str, Any]:
    step = Step(workload, model, device)
    unrecorded = _warm_up(step, mode, device)
    if not mode.keeps_state:
        step = Step(workload, model, device)  # and with the old one its graph is gone
    step.zero_grad()
    empty_allocator(device)
    recording = record(
        mode.phases(step),
        device=device,
        identify=lambda: known_tensors(model, step),
        observer=Observer({address_of(p): name for name, p in model.named_parameters()}),
    )
    accounting = account(device)
    kept = _keep(recording, point, mode.name)
    stream = STREAM_ELEMENT_BYTES * workload.shape.tokens * workload.shape.d_model
    summary = summarize(recording, keeps_graph=mode.keeps_graph, stream_bytes=stream)
    return {
        **_ending(recording, summary, mode.name),
        **summary,
        "max_memory_allocated_bytes": peak_memory_bytes(device),
        "unrecorded_peak_bytes": unrecorded,
        "accounting": accounting,
        "snapshot": kept,
    }


def _warm_up(step: Step, mode: Mode, device: torch.device) -> int | None:
    """One step unrecorded; its peak, or None on a CPU.

    If it runs out of memory, so does the recorded one after it, which then tells why.
    """
    try:
        for _, run in mode.phases(step):
            run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        forget_graph(step)
        return None
    synchronize(device)
    return peak_memory_bytes(device)


def forget_graph(step: Step) -> None:
    """Drop what a forward pass left for a backward pass that did not come to its end."""
    vars(step)["_loss"] = None


def known_tensors(model: nn.Module, step: Step) -> dict[int, KnownTensor]:
    """Whatever lies at a known address now: the model, its gradients, optimizer state, batch."""
    return {
        address_of(tensor): KnownTensor(
            category=category, name=name, size=tensor.untyped_storage().nbytes()
        )
        for category, name, tensor in _named_tensors(model, step)
    }


def _named_tensors(model: nn.Module, step: Step) -> Iterator[tuple[str, str, Tensor]]:
    # A step keeps its batch and its optimizer to itself; only here is anybody else curious.
    yield from (("other", name, vars(step)[f"_{name}"]) for name in ("tokens", "targets"))
    yield from (("other", name, buffer) for name, buffer in model.named_buffers())
    state = step._optimizer.state
    for name, parameter in model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", parameter.grad
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield "optimizer_state", f"{key} of {name}", value


def prediction(
    workload: Workload, mode: peak.PeakMode, device: torch.device
) -> dict[str, Any] | None:
    """The cost model's peak with its parts; None for what it does not describe."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return None
    moment = peak.predicted_peak(
        workload.shape,
        workload.precision.name,  # type: ignore[arg-type]
        mode,
        device="cuda" if device.type == "cuda" else "cpu",
    )
    return {
        "bytes": moment.parts.total,
        "phase": moment.phase,
        "moment": moment.name,
        "categories_bytes": asdict(moment.parts),
    }


def _too_large(predicted: Mapping[str, Any] | None, device: torch.device) -> str | None:
    """Why a mode is not tried; only a GPU says beforehand what it has."""
    if predicted is None or device.type != "cuda":
        return None
    free = int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    if predicted["bytes"] <= free:
        return None
    return f"needs about {predicted['bytes'] / GIB:.1f} GiB, {free / GIB:.1f} GiB free"


def _ending(recording: Recording, summary: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """How the mode ended, and what it asked for where that could not be had."""
    if recording.out_of_memory is None:
        return {"status": "ok", "reason": None, "asked_bytes": None}
    failures = [event.size for event in recording.history.events if event.kind == "oom"]
    asked = failures[-1] if failures else None
    live = sum(summary["live_categories_bytes"].values())
    words = f"asked for {asked / GIB:.2f} GiB" if asked else "failed outside the allocator"
    phase = recording.phases[-1].name
    return {
        "status": "oom",
        "reason": f"{words} in {phase} with {live / GIB:.2f} GiB live",
        "asked_bytes": asked,
    }


def _keep(recording: Recording, point: Point, mode: str) -> str | None:
    """The snapshot as torch's viewer opens it: where asked for, and always when memory ran out."""
    wanted = point.settings["keep_snapshots"] or recording.out_of_memory is not None
    if recording.snapshot is None or not wanted:
        return None
    path = point.path(SNAPSHOTS, find_machine().id).with_suffix("") / f"{mode}.pickle"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(recording.snapshot, file)
    return path.as_posix()
