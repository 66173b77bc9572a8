"""Results of the precision chapter by topic: one result each for sums, autocast and LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, Row

LOOPS = {
    "fp32": "fp32 += fp32",
    "fp16": "fp16 += fp16",
    "fp32_plus_fp16": "fp32 += fp16",
    "fp32_plus_fp16_cast": "fp32 += fp16 cast up",
}
COMPONENTS = {
    "parameters": "parameters",
    "fc1_output": "output of fc1",
    "layernorm_output": "output of LayerNorm",
    "logits": "logits",
    "loss": "loss",
    "gradients": "gradients",
}
BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def rows_of(collected: Collected, topic: str) -> list[Row]:
    """The points of one topic."""
    return [row for row in collected.rows if row.point.parameters["topic"] == topic]


def data_of(collected: Collected, topic: str) -> Mapping[str, Any] | None:
    """What the topic's one measured result holds, or None."""
    measured = [row.result for row in rows_of(collected, topic) if row.status == "ok"]
    return measured[0].data if measured and measured[0] is not None else None


def status_of(collected: Collected, topic: str) -> str:
    """Why a topic has no data."""
    rows = rows_of(collected, topic)
    return rows[0].status if rows else "missing"


def loops(collected: Collected) -> dict[str, dict[str, Any]]:
    """The accumulation loops by name: accumulator, term, result, exact, error."""
    data = data_of(collected, "accumulation")
    return {loop["name"]: loop for loop in data["loops"]} if data is not None else {}


def trace(collected: Collected) -> pd.DataFrame:
    """The running fp16 sum: step, sum, spacing of numbers there, what the addition added."""
    data = data_of(collected, "accumulation")
    columns = ["step", "sum", "spacing", "added"]
    kept = {} if data is None else {name: data["fp16_trace"][name] for name in columns}
    return pd.DataFrame(kept, columns=columns)


def autocast(collected: Collected) -> dict[str, dict[str, str]]:
    """Data type of each component, by the autocast type asked for; only what was measured."""
    return {
        str(row.point.parameters["dtype"]): {
            component["name"]: str(component["dtype"])
            for component in row.result.data["components"]
        }
        for row in rows_of(collected, "autocast")
        if row.result is not None and row.status == "ok"
    }


def variances(collected: Collected) -> pd.DataFrame:
    """Variance computed in each type over input scales; empty when not measured."""
    data = data_of(collected, "layernorm")
    columns = [
        "dtype", "scale", "true_variance", "computed_variance", "overflow", "underflow",
        "relative_error",
    ]  # fmt: skip
    rows = [] if data is None else [{name: row[name] for name in columns} for row in data["rows"]]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"overflow": bool, "underflow": bool, "relative_error": float})


def output_errors(collected: Collected) -> pd.DataFrame:
    """Largest error of LayerNorm's output over input scales; NaN where it is not finite."""
    data = data_of(collected, "layernorm") or {}
    columns = ["dtype", "scale", "largest_error"]
    rows = [{name: row[name] for name in columns} for row in data.get("layernorm_rows", ())]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"largest_error": float})
