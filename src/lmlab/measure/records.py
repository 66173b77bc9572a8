"""Tidy records: one measured quantity per record, with labels that identify it within its result.

A result's `measurements` is a list of these. Labels say which part of the point a number belongs
to (phase, variant, operation, ...); the point's own parameters are not repeated. A variant that
failed inside a point that succeeded is a record too, with a status and a reason and no value.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmlab.measure.statistics import Measurement

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
Label = str | int | float | bool


def timed(measurement: Measurement, quantity: str = "time", **labels: Label) -> Record:
    """A record of timing samples, in milliseconds."""
    statistics = asdict(measurement.summary)
    return {
        **_record(quantity, labels, unit="ms", value=statistics.pop("median")),
        "clock": measurement.clock,
        "cache": measurement.cache,
        "stopped": measurement.stopped,
        "samples": list(measurement.samples_ms),
        **statistics,
    }


def value(quantity: str, number: float | int | str | bool, unit: str, **labels: Label) -> Record:
    """A record of one number (or string) without samples: bytes, FLOPs, a count, a dtype."""
    return _record(quantity, labels, unit=unit, value=number)


def values(numbers: Mapping[str, Any], prefix: str = "", **labels: Label) -> list[Record]:
    """One record per number, with the unit from its key: `busy_ns` becomes `busy_time` in ms with
    clock `device`, `peak_bytes` becomes `peak` in bytes, anything else is a count. Text, None and
    nested values are skipped."""
    records = []
    for key, number in numbers.items():
        if not isinstance(number, int | float):
            continue
        name, _, unit = f"{prefix}{key}".rpartition("_")
        if unit == "ns":
            records.append(
                value(f"{name}_time", number / 1e6, "ms", **labels) | {"clock": "device"}
            )
        elif unit == "bytes":
            records.append(value(name, number, "B", **labels))
        else:
            records.append(value(f"{prefix}{key}", number, "", **labels))
    return records


def plain_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A frame's rows as dictionaries of plain values for JSON; missing values become None."""
    plain = frame.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")  # type: ignore[return-value]


def by_label(
    quantity: str, label: str, counts: Mapping[str, int], unit: str = "B", **labels: Label
) -> list[Record]:
    """One record per value of a label: bytes by category, instances by line."""
    return [value(quantity, n, unit, **{label: name}, **labels) for name, n in counts.items()]


def without_value(quantity: str, status: str, reason: str, **labels: Label) -> Record:
    """A record that says why there is no number: oom, unsupported or failed."""
    return _record(quantity, labels, unit="", value=None, status=status, reason=reason)


def _record(
    quantity: str,
    labels: Mapping[str, Label],
    *,
    unit: str,
    value: float | int | str | bool | None,
    status: str = "ok",
    reason: str | None = None,
) -> Record:
    return {
        "quantity": quantity,
        "labels": dict(labels),
        "status": status,
        "reason": reason,
        "unit": unit,
        "value": value,
    }
