"""Recorded modes and predictions as records; the package's docstring lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.measure.records import Record, by_label, value, values, without_value
from lmlab.model.peak import Stage
from lmlab.study.results import Status


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """How one mode ended, and what was recorded; empty for a mode that was not tried."""

    mode: str
    predicted: Stage | None
    status: Status = "ok"
    reason: str | None = None
    summary: Mapping[str, Any] | None = None
    counters: Mapping[str, int | None] = field(default_factory=dict)
    """`allocator_peak`, `unrecorded_peak`, and `asked`: size of the failed allocation, in bytes."""
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
    return values({"tf32": tf32, "threads": torch.get_num_threads()})


def mode_records(found: ModeResult) -> list[Record]:
    """Everything about one mode; one that failed has no peak but a reason."""
    mode, summary = found.mode, found.summary
    records = [
        *predicted_records(found.predicted, mode=mode),
        *values({f"{name}_bytes": count for name, count in found.counters.items()}, mode=mode),
        *accounting_records(found.accounting, stage="after", mode=mode),
    ]
    if found.snapshot:
        records.append(value("snapshot", found.snapshot, "", mode=mode))
    if found.status != "ok":
        records.append(without_value("peak_memory", found.status, str(found.reason), mode=mode))
    if summary is None:
        return records
    if found.status == "ok":
        highest = found.counters.get("allocator_peak") or summary["replayed_peak_bytes"]
        records.append(value("peak_memory", highest, "B", mode=mode))
    stage = "peak" if found.status == "ok" else "failure"
    return [
        *records,
        *values(summary, mode=mode),
        value("peak_phase", summary["peak_phase"], "", mode=mode),
        *by_label("stream_allocations_by_line", "origin", summary["stream_lines"], "", mode=mode),
        *(r for p in summary["phases"] for r in _phase_records(p, mode)),
        *_live_records(summary, mode=mode, stage=stage),
    ]


def _phase_records(phase: Mapping[str, Any], mode: str) -> list[Record]:
    sizes = {key: phase[key] for key in ("peak_bytes", "end_bytes")}
    return values(sizes, "phase_", mode=mode, phase=phase["name"])


def _live_records(summary: Mapping[str, Any], **where: str) -> list[Record]:
    return [
        *by_label("live", "category", summary["live_categories"], **where),
        *by_label("attention_weights", "dtype", summary["live_scores"], **where),
        *(
            value("live_by_line", row["bytes"], "B", **_origin(row), **where)
            for row in summary["live_lines"]
        ),
        *(
            value("allocation", row["each_bytes"], "B", **_origin(row), **where)
            for row in summary["live_largest"]
        ),
    ]


def _origin(row: Mapping[str, Any]) -> dict[str, Any]:
    """Which line made it; autograd's own thread runs no line of the program."""
    line = "no line" if row["file"] is None else f"{row['file']}:{row['line']} {row['function']}"
    labels = {key: row[key] for key in ("category", "phase", "count")} | {"origin": line}
    return labels | ({"what": row["what"], "total_bytes": row["bytes"]} if "what" in row else {})


def predicted_records(moment: Stage | None, **labels: str | int) -> list[Record]:
    """The predicted peak with its phase and stage, and its parts."""
    if moment is None:
        return []
    where = {"phase": moment.phase, "stage": moment.name, **labels}
    return [
        value("predicted_peak", moment.parts.total, "B", **where),
        *by_label("predicted_live", "category", asdict(moment.parts), "B", **labels),
    ]


def accounting_records(accounting: Mapping[str, Any], **labels: str) -> list[Record]:
    """The device's memory by layer; what is not bytes keeps its own name."""
    known = {name: found for name, found in accounting.items() if found is not None}
    layers = {k.removesuffix("_bytes"): n for k, n in known.items() if k.endswith("_bytes")}
    others = {name: n for name, n in known.items() if not name.endswith("_bytes")}
    return [*by_label("device_memory", "layer", layers, **labels), *values(others, **labels)]


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
