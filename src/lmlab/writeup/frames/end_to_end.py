"""End-to-end results as tidy frames: one row a point and phase, derived rates beside the times.

Every point of the study has its rows, whether it was measured or not; `status` says which, and the
numbers of a point that did not run are NaN. Rates (tokens/s, TFLOP/s) are taken from the median,
because one interrupted step must not lower a throughput. The FLOPs are the model's matmuls as its
cost model counts them; what the count leaves out (softmax, norms, the optimizer's arithmetic) takes
time without counting as work, which is what a utilisation is meant to show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, Row

PHASES_OF_MODE = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
}
PLACE = ["size", "context", "batch"]
"""What a table's row is about; precision and mode are its columns."""

STATISTICS = ("n", "mean_ms", "sd_ms", "median_ms", "q1_ms", "q3_ms")
COLUMNS = [
    *PLACE, "precision", "mode", "attention", "warmup", "start", "status", "phase", *STATISTICS,
    "samples_ms", "warmup_ms", "busy_share", "flops", "tflops", "tokens_per_s", "parameters",
]  # fmt: skip


def frame(collected: Collected) -> pd.DataFrame:
    """All points, phase by phase, in the study's order."""
    records = [record for row in collected.rows for record in _records(row)]
    return pd.DataFrame(records, columns=COLUMNS)


def grid(data: pd.DataFrame) -> pd.DataFrame:
    """The points at the study's own warm-up; cold starts are a question of their own."""
    return data[data["start"] == "warm"]


def cold(data: pd.DataFrame) -> pd.DataFrame:
    """The cold starts, each in a process of its own."""
    return data[data["start"] == "cold"]


def measured(data: pd.DataFrame) -> pd.DataFrame:
    """Rows that carry a time."""
    return data[data["status"].eq("ok") & data["median_ms"].notna()]


def of(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows with these values; a set means any of its values."""
    for column, value in wanted.items():
        values = data[column]
        data = data[values.isin(value) if isinstance(value, set) else values == value]
    return data


def order(data: pd.DataFrame, column: str) -> list[Any]:
    """A column's values in the study's order."""
    return list(dict.fromkeys(data[column]))


def places(data: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Size, context and batch of every row of a table, in the study's order."""
    return list(dict.fromkeys(data[PLACE].itertuples(index=False, name=None)))


def pairs(left: pd.DataFrame, right: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Two arms side by side where both were measured; columns end in `_a` and `_b`."""
    return measured(left).merge(measured(right), on=list(on), suffixes=("_a", "_b"))


def ratio_of_backward(data: pd.DataFrame) -> pd.DataFrame:
    """Backward over forward of the same training steps, with both phases' GPU-busy shares."""
    steps = of(grid(data), mode="train_step")
    paired = pairs(of(steps, phase="forward"), of(steps, phase="backward"), [*PLACE, "precision"])
    return paired.assign(ratio=paired["median_ms_b"] / paired["median_ms_a"])


def _records(row: Row) -> list[dict[str, Any]]:
    shared = {**row.point.parameters, "status": row.status}
    phases = (*PHASES_OF_MODE[str(row.point.parameters["mode"])], "total")
    if row.result is None or row.result.status != "ok":
        return [{**shared, "phase": phase} for phase in phases]
    data = row.result.data
    times = {phase: row.result.measurements[phase] for phase in phases}
    return [
        {
            **shared,
            "phase": phase,
            **{name: _number(measurement[name]) for name in STATISTICS},
            "samples_ms": list(measurement["samples_ms"]),
            "warmup_ms": list(data["warmup_samples_ms"].get(phase, ())),
            "busy_share": _busy_share(data, phase, measurement["median_ms"]),
            "parameters": data["parameters_total"],
            **_rates(data, phase, times),
        }
        for phase, measurement in times.items()
    ]


def _rates(
    data: Mapping[str, Any], phase: str, measurements: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    counted = data["flops"] or {}  # null for a model that the cost model does not describe
    parts = [name for name in counted if name in measurements and phase in (name, "total")]
    flops = sum(counted[name]["matmul"] for name in parts) if counted else math.nan
    seconds = measurements[phase]["median_ms"] / 1000
    return {
        "flops": flops,
        "tflops": flops / seconds / 1e12 if seconds else math.nan,
        "tokens_per_s": data["tokens_per_step"] / seconds if seconds else math.nan,
    }


def _busy_share(data: Mapping[str, Any], phase: str, median_ms: float) -> float:
    """How much of a phase's host time the GPU was running something; NaN where there is no GPU."""
    busy = data.get("gpu_busy_ms")
    if not busy or not median_ms:
        return math.nan
    if phase == "total":
        return sum(busy.values()) / median_ms
    return busy[phase] / median_ms if phase in busy else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
