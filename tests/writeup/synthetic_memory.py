"""Results of the memory chapter as a GPU or a CPU would leave them, from the cost model.

Each mode's peak is the predicted one with a workspace that no tensor owns and the rounding of an
allocator on top; its timeline climbs and falls, with the peak in the phase where the model has it.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from lmlab.model import checkpoint_peak, footprint, peak
from lmlab.model.checkpointing import strategy_named
from lmlab.model.cost import parameter_count
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.writeup import factory

MIB = 2**20
WORKSPACE = 40 * MIB
ROUNDING = 1.008
SHAPE_KEYS = ("vocab_size", "context", "batch", "d_model", "d_ff", "num_layers", "num_heads")
PHASES = {"forward": ["forward"], "forward_graph": ["forward"]}
TRAINING = ["forward", "backward", "optimizer"]
EVENTS = 300
CAPACITY = {"cuda": 139 * 2**30, "cpu": None}


def memory(point: Point, device: str = "cuda") -> Result:
    """A point of either topic."""
    if point.parameters["topic"] == "checkpointing":
        return checkpointing(point, device)
    modes = {name: mode(point, name, device) for name in ("forward", "forward_graph", "train_step")}
    shape = shape_of(point)
    return factory.result(
        point,
        device,
        data={
            "modes": modes,
            "before": accounting(0, 0, device),
            "stream_bytes": 4 * shape.tokens * shape.d_model,
            "parameters_total": parameter_count(shape).total,
            "tf32": False,
            "threads": 2,
            "recorded_with": "allocator history" if device == "cuda" else "profiler events",
        },
    )


def shape_of(point: Point) -> ModelShape:
    asked = {**point.settings, **point.parameters}
    return ModelShape(**{key: asked[key] for key in SHAPE_KEYS})


def mode(point: Point, name: Any, device: str = "cuda") -> dict[str, Any]:
    """One recorded mode."""
    where: Any = device
    shape, precision = shape_of(point), str(point.parameters["precision"])
    moment = peak.predicted_peak(shape, precision, name, device=where)  # type: ignore[arg-type]
    parts = asdict(moment.parts)
    extra = WORKSPACE if device == "cuda" else 0
    live = {**parts, "workspace": parts["workspace"] + extra}
    replayed = sum(live.values())
    gpu = device == "cuda"
    allocated = int(ROUNDING * replayed) if gpu else None
    timeline, phases, peak_event = curve(shape, name, moment.phase, live)
    stream = 4 * shape.tokens * shape.d_model
    return {
        "status": "ok",
        "reason": None,
        "asked_bytes": None,
        "events": phases[-1]["last_event"],
        "history_was_cut": False,
        "replayed_bytes": replayed,
        "replayed_requested_bytes": replayed,
        "peak_event": peak_event,
        "peak_phase": moment.phase,
        "live_categories_bytes": live,
        "live_pieces": 100,
        "live_lines": [line("activations", live["activations"]), line("gradients", 5 * MIB, None)],
        "live_largest": [
            {
                "each_bytes": stream,
                "what": "softmax 4×8×128×128 fp32",
                **line("activations", stream),
            },
            {"each_bytes": MIB, "what": "", **line("workspace", MIB, None)},
        ],
        "phases": phases,
        "timeline": timeline,
        "stream": {
            "bytes": stream,
            "allocated": 90,
            "live_at_peak": 40,
            "lines": {"no line": 60, "lmlab/model/layers.py:109": 30},
        },
        "max_memory_allocated_bytes": allocated,
        "unrecorded_peak_bytes": allocated,
        "accounting": accounting(replayed, allocated, device),
        "snapshot": None,
        "predicted": prediction(moment),
    }


def line(category: str, size: int, file: str | None = "lmlab/model/layers.py") -> dict[str, Any]:
    return {
        "file": file,
        "line": 55 if file else None,
        "function": "forward" if file else None,
        "category": category,
        "phase": "forward" if file else "backward",
        "bytes": size,
        "count": 3,
    }


def prediction(moment: peak.Moment) -> dict[str, Any]:
    return {
        "bytes": moment.parts.total,
        "phase": moment.phase,
        "moment": moment.name,
        "categories_bytes": asdict(moment.parts),
    }


def accounting(replayed: int, allocated: int | None, device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"resident_bytes": 600 * MIB}
    top = allocated or 0
    reserved = int(1.04 * top)
    return {
        "device_total_bytes": CAPACITY["cuda"],
        "device_used_bytes": reserved + 520 * MIB,
        "nvidia_smi_used_bytes": reserved + 1150 * MIB,
        "outside_pytorch_bytes": 520 * MIB,
        "nccl_is_running": False,
        "reserved_bytes": reserved,
        "allocated_bytes": top // 2,
        "requested_bytes": int(0.99 * (top // 2)),
        "inactive_split_bytes": 30 * MIB,
        "peak_reserved_bytes": reserved,
        "peak_allocated_bytes": top,
        "peak_requested_bytes": replayed,
        "peak_inactive_split_bytes": 300 * MIB,
        "alloc_retries": 0,
    }


def curve(
    shape: ModelShape, name: str, peak_phase: str, live: dict[str, int]
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Activations up in forward and down in backward, gradients up; the peak where it belongs."""
    names = PHASES.get(name, TRAINING)
    edges = [EVENTS * n for n in range(len(names) + 1)]
    middle = edges[names.index(peak_phase)] + EVENTS // 3
    events = [*range(0, edges[-1], 5), edges[-1]]
    values: dict[str, list[int]] = {key: [] for key, value in live.items() if value}
    for event in events:
        for key, curve in values.items():
            curve.append(live[key] if event == middle else height(key, event, live[key]))
    totals = [sum(step) for step in zip(*values.values(), strict=True)]
    phases = [
        {
            "name": phase,
            "first_event": edges[n],
            "last_event": edges[n + 1],
            "peak_bytes": max(totals),
            "end_bytes": totals[-1],
        }
        for n, phase in enumerate(names)
    ]
    return {"event": events, "bytes": values}, phases, middle


def height(category: str, event: int, top: int) -> int:
    """What a category has at an event, below its height at the peak."""
    turn = math.sin(event / 13) ** 2
    if category == "activations":
        share = event / EVENTS if event <= EVENTS else max(0.0, 2 - event / EVENTS)
        return int(0.97 * top * share)
    if category == "gradients":
        return int(0.97 * top * min(max(event / EVENTS - 1, 0.0), 1.0))
    if category == "workspace":
        return int(0.5 * top * turn)
    return top


def checkpointing(point: Point, device: str = "cuda") -> Result:
    """Strategies whose times grow with what is computed again; what is too large does not fit."""
    shape, precision = shape_of(point), str(point.parameters["precision"])
    arms, measurements = [], {}
    for name in str(point.settings["strategies"]).split(","):
        arm = strategy(shape, precision, name, device)
        arms.append(arm)
        if arm["status"] == "ok":
            times = [arm["median_ms"] * wave for wave in (0.99, 1.0, 1.0, 1.01)]
            measurements[name] = factory.measurement(times)
    where: Any = device
    best, moment = checkpoint_peak.best_segment(shape, precision, device=where)  # type: ignore[arg-type]
    return factory.result(
        point,
        device,
        measurements=measurements,
        data={
            "arms": arms,
            "num_layers": shape.num_layers,
            "input_bytes": 4 * shape.tokens * shape.d_model,
            "best_predicted": {"blocks": best, **prediction(moment)},
            "tf32": False,
            "threads": 2,
        },
    )


def strategy(shape: ModelShape, precision: str, name: str, device: str) -> dict[str, Any]:
    kind = strategy_named(name)
    wanted: Any = precision
    where: Any = device
    if kind.kind == "nested":
        moment = checkpoint_peak.predicted_peak_nested(shape, wanted, device=where)
    else:
        moment = checkpoint_peak.predicted_peak_checkpointed(
            shape, wanted, kind.blocks, device=where
        )
    levels = math.ceil(math.log2(max(shape.num_layers, 2)))
    forward_passes = {"none": 1, "every": 2, "nested": 1 + levels}[kind.kind]
    capacity = CAPACITY[device]
    fits = capacity is None or moment.parts.total < capacity
    inputs = {"none": 0, "every": shape.num_layers // max(kind.blocks, 1), "nested": 2}[kind.kind]
    kept = 4 * shape.tokens * shape.d_model * inputs
    if kind.kind == "none":
        kept = footprint.saved_activations(shape, wanted, device=where)
    return {
        "name": name,
        "kind": kind.kind,
        "blocks": kind.blocks,
        "status": "ok" if fits else "oom",
        "reason": None if fits else "did not fit with up to 138.20 GiB live",
        "peak_bytes": int(1.01 * moment.parts.total) if fits else None,
        "kept_bytes": kept if fits else None,
        "median_ms": 300.0 * (2 + forward_passes) if fits else None,
        "predicted": prediction(moment),
    }
