"""The modes of one size, context and precision, recorded one after the other in one process."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lmlab.chapters.memory.measure import shared
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.workload import Phases, Step, Workload, workload_of
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes
from lmlab.measure.identity import find_machine
from lmlab.measure.memory.accounting import account
from lmlab.measure.memory.recorder import Recording, record
from lmlab.measure.memory.summary import summarize
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, by_label, value, values, without_value
from lmlab.measure.time_spent import measuring
from lmlab.model import peak
from lmlab.study.points import Point

SNAPSHOTS = Path("snapshots")


class Mode(NamedTuple):
    """One way to run the model, as phases of a step."""

    name: peak.PeakMode
    phases: Callable[[Step], Phases]
    keeps_graph: bool = True
    keeps_state: bool = False
    """Whether the optimizer's state lasts from one step to the next."""


MODES = (
    Mode("forward", lambda step: [("forward", step.infer)], keeps_graph=False),
    Mode("forward_graph", lambda step: [("forward", step.forward)]),
    Mode("train_step", lambda step: step.phases()[1:], keeps_state=True),  # without zero_grad
)


def measure(point: Point, device: torch.device) -> Outcome:
    """All modes of one size, context and precision."""
    workload = workload_of(point, mode="train_step")
    # Objects that exist now are never garbage, and scanning them repeatedly outlasts a step.
    with tf32_allowed(workload.precision.tf32), collector_paused():
        torch.empty(1, device=device)  # creates the device's context
        shared.empty_allocator(device)
        before = account(device)
        model = workload.build(device)
        shared.empty_allocator(device)
        records = [
            value("stream_bytes", shared.stream_bytes(workload.shape), "B"),
            value("parameters", sum(p.numel() for p in model.parameters()), ""),
            *shared.environment_records(),
            *accounting_records(before, stage="before"),
        ]
        timelines: dict[str, Any] = {}
        for mode in MODES:
            found, timeline = _mode(mode, workload, model, point, device)
            records += found
            timelines |= timeline
    peaks = [each for each in records if each["quantity"] == "peak_memory"]
    if any(each["status"] == "ok" for each in peaks):
        return Outcome(measurements=records, data=timelines)
    first = peaks[0]
    reason = f"{first['labels']['mode']}: {first['reason']}"
    return Outcome(status=first["status"], reason=reason, data={**timelines, "records": records})


def _mode(
    mode: Mode, workload: Workload, model: nn.Module, point: Point, device: torch.device
) -> tuple[list[Record], dict[str, Any]]:
    """Records of one mode, and its timeline keyed by mode name unless the mode was skipped."""
    asked = shared.for_cost_model(workload, device)
    predicted = peak.predicted_peak(**asked, mode=mode.name) if asked else None
    records = shared.predicted_records(predicted, mode=mode.name)
    if point.settings["skip_if_too_large"] and (reason := too_large(predicted, device)):
        records.append(without_value("peak_memory", "unsupported", reason, mode=mode.name))
        return records, {}
    try:
        step = Step(workload, model, device)
        unrecorded = _warm_up(step, mode, device)
        if not mode.keeps_state:
            step = Step(workload, model, device)  # drops the warm-up's graph
        step.zero_grad()
        shared.empty_allocator(device)
        recording = record(
            mode.phases(step),
            device=device,
            identify=lambda: shared.known_tensors(model, step),
        )
        records += accounting_records(account(device), stage="after", mode=mode.name)
        records += values({"unrecorded_peak_bytes": unrecorded}, mode=mode.name)
        if snapshot := save_snapshot(recording, point, mode.name):
            records.append(value("snapshot", snapshot, "", mode=mode.name))
        found, timeline = _recorded(mode, recording, workload, peak_memory_bytes(device))
        return records + found, {mode.name: timeline}
    finally:
        model.zero_grad(set_to_none=True)
        shared.empty_allocator(device)


def _recorded(
    mode: Mode, recording: Recording, workload: Workload, allocator_peak: int | None
) -> tuple[list[Record], dict[str, Any]]:
    """Records and timeline of one mode; if it ran out of memory, a reason replaces the peak."""
    shape, labels = workload.shape, {"mode": mode.name}
    summary = summarize(
        recording,
        keeps_graph=mode.keeps_graph,
        stream_bytes=shared.stream_bytes(shape),
        score_shape=(shape.batch, shape.num_heads, shape.context, shape.context),
    )
    if recording.out_of_memory is None:
        stage, highest = "peak", allocator_peak or summary["replayed_peak_bytes"]
        records = [value("peak_memory", highest, "B", **labels)]
    else:
        stage = "failure"
        # A failure outside the allocator names no allocation.
        failures = [event.size for event in recording.history.events if event.kind == "oom"]
        asked, used = [None, *failures][-1], sum(summary["live_categories"].values())
        more = f"{asked / shared.GIB:.1f} GiB more" if asked else "more memory"
        reason = f"{recording.phases[-1].name} needs {more}"
        reason += f" with {used / shared.GIB:.1f} GiB in use" if used else ""
        records = [without_value("peak_memory", "oom", reason, **labels)]
        records += values({"asked_bytes": asked}, **labels)
    records += [
        *values({"allocator_peak_bytes": allocator_peak, **summary}, **labels),
        value("peak_phase", summary["peak_phase"], "", **labels),
        *by_label("stream_allocations_by_line", "origin", summary["stream_lines"], "", **labels),
        *_live_records(summary, stage=stage, **labels),
    ]
    for phase in summary["phases"]:
        sizes = {key: phase[key] for key in ("peak_bytes", "end_bytes")}
        records += values(sizes, "phase_", phase=phase["name"], **labels)
    events = ("name", "first_event", "last_event")
    phases = [{key: phase[key] for key in events} for phase in summary["phases"]]
    return records, {**summary["timeline"], "phases": phases}


def _live_records(summary: Mapping[str, Any], **where: str) -> list[Record]:
    lines, largest = summary["live_lines"], summary["live_largest"]
    return [
        *by_label("live", "category", summary["live_categories"], **where),
        *by_label("attention_weights", "dtype", summary["live_scores"], **where),
        *(value("live_by_line", row["bytes"], "B", **_origin(row), **where) for row in lines),
        *(value("allocation", row["each_bytes"], "B", **_origin(row), **where) for row in largest),
    ]


def _origin(row: Mapping[str, Any]) -> dict[str, Any]:
    """Labels with the source line of an allocation; autograd's thread runs no Python line."""
    line = "no line" if row["file"] is None else f"{row['file']}:{row['line']} {row['function']}"
    labels = {key: row[key] for key in ("category", "phase", "count")} | {"origin": line}
    return labels | ({"what": row["what"], "total_bytes": row["bytes"]} if "what" in row else {})


def accounting_records(accounting: Mapping[str, Any], **labels: str) -> list[Record]:
    """Device memory by layer; fields that are not bytes become quantities of their own name."""
    known = {name: found for name, found in accounting.items() if found is not None}
    layers = {k.removesuffix("_bytes"): n for k, n in known.items() if k.endswith("_bytes")}
    others = {name: n for name, n in known.items() if not name.endswith("_bytes")}
    return [*by_label("device_memory", "layer", layers, **labels), *values(others, **labels)]


@measuring()
def _warm_up(step: Step, mode: Mode, device: torch.device) -> int | None:
    """Run one unrecorded step; returns its peak, or None on a CPU. If it runs out of memory, so
    does the recorded step, which then gives the reason."""
    try:
        for _, run in mode.phases(step):
            run()
        synchronize(device)
        return peak_memory_bytes(device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # The error is gone, and with it the traceback that kept tensors alive; drop the graph, too.
    vars(step)["_loss"] = None
    return None


def too_large(predicted: peak.Stage | None, device: torch.device) -> str | None:
    """Why a mode is not tried; a CPU can swap, so only a GPU refuses."""
    if predicted is None or device.type != "cuda":
        return None
    needed = predicted.parts.total
    free = int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    if needed <= free:
        return None
    return f"needs about {needed / shared.GIB:.1f} GiB, {free / shared.GIB:.1f} GiB free"


def save_snapshot(recording: Recording, point: Point, mode: str) -> str | None:
    """Save the snapshot for torch's memory viewer, if requested or if memory ran out."""
    wanted = point.settings["keep_snapshots"] or recording.out_of_memory is not None
    if recording.snapshot is None or not wanted:
        return None
    path = point.path(SNAPSHOTS, find_machine().id).with_suffix("") / f"{mode}.pickle"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(recording.snapshot))
    return path.as_posix()
