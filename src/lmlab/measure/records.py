"""Tidy records: one measured quantity per record, with labels that identify it within its result.

A result's `measurements` is a list of these. Labels say which part of the point a number belongs
to (phase, variant, operation, ...); the point's own parameters are not repeated. A variant that
failed inside a point that succeeded is a record too, with a status and a reason and no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.measure.statistics import Measurement, summarize

Record = dict[str, Any]
Label = str | int | float | bool


def timed(measurement: Measurement, quantity: str = "time", **labels: Label) -> Record:
    """A record of timing samples, in milliseconds."""
    return {
        **_record(quantity, labels, unit="ms", value=measurement.median_ms),
        "clock": measurement.clock,
        "cache": measurement.cache,
        "stopped": measurement.stopped,
        **_statistics(measurement.samples_ms),
    }


def value(quantity: str, number: float | int | str | bool, unit: str, **labels: Label) -> Record:
    """A record of one number (or string) without samples: bytes, FLOPs, a count, a dtype."""
    return _record(quantity, labels, unit=unit, value=number)


def values(numbers: Mapping[str, Any], prefix: str = "", **labels: Label) -> list[Record]:
    """A record per number, with the unit in its key: `busy_ns` becomes `busy_time` in milliseconds
    of the device, `peak_bytes` becomes `peak` in bytes, the rest are counts. Text, None and nested
    values are left out."""
    return [
        {**value(f"{prefix}{key[:-3]}_time", number / 1e6, "ms", **labels), "clock": "device"}
        if key.endswith("_ns")
        else value(
            prefix + key.removesuffix("_bytes"),
            number,
            "B" if key.endswith("_bytes") else "",
            **labels,
        )
        for key, number in numbers.items()
        if isinstance(number, int | float)
    ]


def by_label(
    quantity: str, label: str, counts: Mapping[str, int], unit: str = "B", **labels: Label
) -> list[Record]:
    """A quantity by one label: bytes by category, instances by line."""
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


def _statistics(samples: tuple[float, ...]) -> Record:
    summary = summarize(samples)
    return {
        "samples": list(samples),
        "n": summary.n,
        "q1": summary.q1,
        "q3": summary.q3,
        "min": summary.minimum,
        "max": summary.maximum,
        "mean": summary.mean,
        "sd": summary.sd,
        "noisy": summary.noisy,
        "drift": summary.drift,
        "stability": summary.stability,
    }
