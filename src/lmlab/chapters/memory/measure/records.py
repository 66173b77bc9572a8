"""Recorded modes and predictions as records; the package's docstring lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.measure.records import Record, value, without_value
from lmlab.model.peak import Stage
from lmlab.study.results import Status

# Quantities of a recording by their names in `measure.memory.summary`, with units.
OF_SUMMARY = {
    "replayed_bytes": ("replayed_peak", "B"),
    "replayed_requested_bytes": ("requested_peak", "B"),
    "peak_phase": ("peak_phase", ""),
    "events": ("events", ""),
    "peak_event": ("peak_event", ""),
    "live_pieces": ("live_pieces", ""),
    "history_was_cut": ("history_cut", ""),
}
OF_STREAM = {"allocated": "stream_allocations", "live_at_peak": "stream_live"}


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """How one mode ended, and what was recorded; empty for a mode that was not tried."""

    mode: str
    predicted: Stage | None
    status: Status = "ok"
    reason: str | None = None
    summary: Mapping[str, Any] | None = None
    counters: Mapping[str, int | None] = field(default_factory=dict)
    """`allocator_peak`, `unrecorded_peak`, and `asked`: size of the failed allocation."""
    accounting: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None


def outcome_of(
    parts: Sequence[tuple[str, Status, str | None]],
    records: Sequence[Record],
    data: Mapping[str, Any],
) -> Outcome:
    """The point has numbers if one of its parts has; otherwise the records are kept as data."""
    if any(status == "ok" for _, status, _ in parts):
        return Outcome(measurements=records, data=data)
    name, status, reason = parts[0]
    return Outcome(status=status, reason=f"{name}: {reason}", data={**data, "records": records})


def environment_records() -> list[Record]:
    """Switches and threads that the measurement ran with."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return [value("tf32", tf32, ""), value("threads", torch.get_num_threads(), "")]


def mode_records(found: ModeResult) -> list[Record]:
    """Everything about one mode; one that failed has no peak but a reason."""
    mode, summary = found.mode, found.summary
    counters = {name: count for name, count in found.counters.items() if count is not None}
    records = predicted_records(found.predicted, mode=mode)
    if found.status != "ok":
        records.append(without_value("peak_memory", found.status, str(found.reason), mode=mode))
    elif summary is not None:
        highest = counters.get("allocator_peak", summary["replayed_bytes"])
        records.append(value("peak_memory", highest, "B", mode=mode))
    records += [value(name, count, "B", mode=mode) for name, count in counters.items()]
    records += [value("snapshot", found.snapshot, "", mode=mode)] if found.snapshot else []
    records += accounting_records(found.accounting, stage="after", mode=mode)
    if summary is not None:
        records += _recording_records(summary, mode)
        records += _live_records(summary, mode, "peak" if found.status == "ok" else "failure")
    return records


def _recording_records(summary: Mapping[str, Any], mode: str) -> list[Record]:
    stream = summary["stream"]
    records = [value(n, summary[key], unit, mode=mode) for key, (n, unit) in OF_SUMMARY.items()]
    records += [value(name, stream[key], "", mode=mode) for key, name in OF_STREAM.items()]
    records += [
        value("stream_allocations_by_line", count, "", mode=mode, origin=line)
        for line, count in stream["lines"].items()
    ]
    return records + [
        value(f"phase_{key}", phase[f"{key}_bytes"], "B", mode=mode, phase=phase["name"])
        for phase in summary["phases"]
        for key in ("peak", "end")
    ]


def _live_records(summary: Mapping[str, Any], mode: str, stage: str) -> list[Record]:
    where = {"mode": mode, "stage": stage}
    categories, weights = summary["live_categories_bytes"], summary["live_scores_bytes"]
    records = [value("live", n, "B", category=name, **where) for name, n in categories.items()]
    records += [
        value("attention_weights", n, "B", dtype=dtype, **where) for dtype, n in weights.items()
    ]
    records += [
        value("live_by_line", row["bytes"], "B", **_origin(row), **where)
        for row in summary["live_lines"]
    ]
    for row in summary["live_largest"]:
        labels = {"what": row["what"], "total_bytes": row["bytes"], **_origin(row), **where}
        records.append(value("allocation", row["each_bytes"], "B", **labels))
    return records


def _origin(row: Mapping[str, Any]) -> dict[str, Any]:
    """Which line made it; autograd's own thread runs no line of the program."""
    line = "no line" if row["file"] is None else f"{row['file']}:{row['line']} {row['function']}"
    return {**{key: row[key] for key in ("category", "phase", "count")}, "origin": line}


def predicted_records(moment: Stage | None, **labels: str | int) -> list[Record]:
    """The predicted peak with its phase and stage, and its parts."""
    if moment is None:
        return []
    where = {"phase": moment.phase, "stage": moment.name, **labels}
    parts = asdict(moment.parts).items()
    return [
        value("predicted_peak", moment.parts.total, "B", **where),
        *(value("predicted_live", count, "B", category=name, **labels) for name, count in parts),
    ]


def accounting_records(accounting: Mapping[str, Any], **labels: str) -> list[Record]:
    """The device's memory by layer; what is not bytes keeps its own name."""
    known = {name: found for name, found in accounting.items() if found is not None}
    return [
        value("device_memory", found, "B", layer=name.removesuffix("_bytes"), **labels)
        if name.endswith("_bytes")
        else value(name, found, "", **labels)
        for name, found in known.items()
    ]


def timelines(modes: Sequence[ModeResult]) -> dict[str, Any]:
    """Data for figures: bytes by category over the events, and where phases begin and end."""
    return {
        mode.mode: {
            **mode.summary["timeline"],
            "phases": [
                {key: phase[key] for key in ("name", "first_event", "last_event")}
                for phase in mode.summary["phases"]
            ],
        }
        for mode in modes
        if mode.summary is not None
    }
