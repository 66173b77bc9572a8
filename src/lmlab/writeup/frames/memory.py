"""Memory results as tidy frames: one row a point and mode, one row a checkpointing strategy.

A mode has a status of its own, because a train step that does not fit leaves the forward pass its
numbers. The peak is the allocator's counter where there is one; a CPU has none, and there it is the
replayed one. Prediction and replay stand beside it, never in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row

MODES = {
    "forward": "forward without gradient",
    "forward_graph": "forward with its graph",
    "train_step": "training step",
}
CATEGORIES = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "weight_copies": "16-bit weight copies",
    "activations": "activations",
    "workspace": "workspace",
    "other": "other",
}
"""In the order in which a picture stacks them."""
PLACE = ["size", "context", "precision"]

TOLD_IF_OK = ("max_memory_allocated_bytes", "replayed_bytes", "stream")
"""What a mode that ran has, if only to say that its device does not count it."""

TIMELINE, CHECKPOINTING = "timeline", "checkpointing"
BASE, LOW = "fp32", "bf16"
COLUMNS = [
    "size", "context", "batch", "precision", "mode", "status", "reason", "asked_bytes",
    "peak_bytes", "replayed_bytes", "replayed_requested_bytes", "allocated_bytes",
    "requested_bytes", "unrecorded_bytes", "reserved_bytes", "splits_bytes", "peak_phase",
    "history_was_cut", "predicted_bytes", "predicted_phase", "error",
    "stream_bytes", "stream_allocated", "stream_live", "stream_lines",
    *(f"live_{name}" for name in CATEGORIES), *(f"predicted_{name}" for name in CATEGORIES),
]  # fmt: skip
ARM_COLUMNS = [
    "name", "kind", "blocks", "status", "reason", "peak_bytes", "kept_bytes", "predicted_bytes",
    "predicted_phase", "predicted_activations", "predicted_gradient_share", "error",
    "n", "mean_ms", "sd_ms", "median_ms", "q1_ms", "q3_ms",
]  # fmt: skip


def frame(collected: Collected) -> pd.DataFrame:
    """Every point of the grid, mode by mode, the smallest size first."""
    sizes = collected.study.sizes_smallest_first()
    rows = sorted(
        rows_of(collected, TIMELINE), key=lambda row: sizes.index(str(row.point.parameters["size"]))
    )
    records = [record for row in rows for record in _records(row, tuple(MODES))]
    return pd.DataFrame(records, columns=COLUMNS)


def arms(collected: Collected) -> pd.DataFrame:
    """The strategies of checkpointing; empty where they were not measured."""
    records = [
        _arm(arm, row.result.measurements)
        for row in rows_of(collected, CHECKPOINTING)
        if row.result is not None
        for arm in row.kept("arms", ())
    ]
    return pd.DataFrame(records, columns=ARM_COLUMNS)


def rows_of(collected: Collected, topic: str) -> list[Row]:
    """The rows of one topic."""
    return [row for row in collected.rows if row.point.parameters["topic"] == topic]


def measured(data: pd.DataFrame) -> pd.DataFrame:
    """Rows that have a peak."""
    return data[data["status"].eq("ok") & data["peak_bytes"].notna()]


def of(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows with these values."""
    for column, value in wanted.items():
        data = data[data[column] == value]
    return data


def order(data: pd.DataFrame, column: str) -> list[Any]:
    """A column's values in the study's order."""
    return list(dict.fromkeys(data[column]))


def both_precisions(data: pd.DataFrame, mode: str) -> pd.DataFrame:
    """The two precisions of one mode side by side, `_a` and `_b`, where both were measured."""
    rows = measured(of(data, mode=mode))
    left, right = (of(rows, precision=precision) for precision in (BASE, LOW))
    return left.merge(right, on=["size", "context"], suffixes=("_a", "_b"))


def recorded(collected: Collected, place: Mapping[str, Any], mode: str) -> Mapping[str, Any] | None:
    """What a result keeps of one recorded mode; None where it was not measured."""
    for row in rows_of(collected, TIMELINE):
        here = {key: row.point.parameters[key] for key in PLACE}
        if here == dict(place) and row.result is not None:
            found: Mapping[str, Any] | None = row.result.data.get("modes", {}).get(mode)
            return found if found is not None and "timeline" in found else None
    return None


def shown_size(data: pd.DataFrame) -> Any:
    """The size that pictures, lists and explanations are about: the largest."""
    return order(data, "size")[-1]


def shown_places(data: pd.DataFrame) -> list[dict[str, Any]]:
    """Where pictures and lists are taken: largest size, longest context, each precision.

    The longest context of which every precision has a train step, so that they can be compared.
    """
    steps = measured(of(data, mode="train_step"))
    if not len(steps):
        return []
    size = shown_size(steps)
    here = of(steps, size=size)
    precisions = order(here, "precision")
    common = [c for c in order(here, "context") if len(of(here, context=c)) == len(precisions)]
    context = max(common or order(here, "context"))
    return [
        {"size": size, "context": context, "precision": precision}
        for precision in order(of(here, context=context), "precision")
    ]


def unit_of(values: Iterable[float]) -> tuple[str, int]:
    """GiB where something reaches one, else MiB: one unit for a whole table."""
    largest = max((value for value in values if not math.isnan(value)), default=0.0)
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def _records(row: Row, modes: Sequence[str]) -> list[dict[str, Any]]:
    shared = {key: value for key, value in row.point.parameters.items() if key in COLUMNS}
    found = row.kept("modes", {})
    has_all = row.status == "ok"
    return [
        {
            **shared,
            "mode": mode,
            **(_mode(found[mode], row.result) if has_all or mode in found else _gap(row)),
        }
        for mode in modes
    ]


def _gap(row: Row) -> dict[str, Any]:
    return {"status": row.status, "reason": row.reason}


def _mode(mode: Mapping[str, Any], result: Result | None) -> dict[str, Any]:
    assert result is not None, "a mode is part of a result"
    ok = mode["status"] == "ok"
    accounting = mode.get("accounting") or {}
    predicted = mode.get("predicted") or {}
    told = {key: mode[key] if ok else mode.get(key) for key in TOLD_IF_OK}
    peak = told["max_memory_allocated_bytes"] or told["replayed_bytes"]
    stream = told["stream"] or {}
    return {
        "status": mode["status"],
        "reason": mode["reason"],
        "asked_bytes": _number(mode.get("asked_bytes")),
        "peak_bytes": _number(peak) if ok else math.nan,
        "replayed_bytes": _number(mode.get("replayed_bytes")),
        "replayed_requested_bytes": _number(mode.get("replayed_requested_bytes")),
        "allocated_bytes": _number(mode.get("max_memory_allocated_bytes")),
        "requested_bytes": _number(accounting.get("peak_requested_bytes")),
        "unrecorded_bytes": _number(mode.get("unrecorded_peak_bytes")),
        "reserved_bytes": _number(accounting.get("peak_reserved_bytes")),
        "splits_bytes": _number(accounting.get("peak_inactive_split_bytes")),
        "peak_phase": mode.get("peak_phase"),
        "history_was_cut": bool(mode.get("history_was_cut")),
        "predicted_bytes": _number(predicted.get("bytes")),
        "predicted_phase": predicted.get("phase"),
        "error": _number(predicted.get("bytes")) / peak - 1 if ok and peak else math.nan,
        "stream_bytes": result.data["stream_bytes"],
        "stream_allocated": _number(stream.get("allocated")),
        "stream_live": _number(stream.get("live_at_peak")),
        "stream_lines": stream.get("lines") or {},
        **_parts("live_", mode.get("live_categories_bytes")),
        **_parts("predicted_", predicted.get("categories_bytes")),
    }


def _parts(prefix: str, parts: Mapping[str, int] | None) -> dict[str, float]:
    return {f"{prefix}{name}": _number((parts or {}).get(name)) for name in CATEGORIES}


def _arm(arm: Mapping[str, Any], measurements: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    predicted = arm["predicted"] or {}
    parts = predicted.get("categories_bytes")
    times = measurements[arm["name"]] if arm["status"] == "ok" else {}
    peak = _number(arm["peak_bytes"])
    return {
        **{key: arm[key] for key in ("name", "kind", "blocks", "status", "reason")},
        "peak_bytes": peak,
        "kept_bytes": _number(arm["kept_bytes"]),
        "predicted_bytes": _number(predicted.get("bytes")),
        "predicted_phase": predicted.get("phase"),
        "predicted_activations": _number((parts or {}).get("activations")),
        "predicted_gradient_share": _gradient_share(parts),
        "error": _number(predicted.get("bytes")) / peak - 1,
        **{
            key: _number(times.get(key))
            for key in ("n", "mean_ms", "sd_ms", "median_ms", "q1_ms", "q3_ms")
        },
    }


def _gradient_share(parts: Mapping[str, int] | None) -> float:
    """How much of the gradients is there: a gradient is as large as its parameter."""
    return parts["gradients"] / parts["parameters"] if parts else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
