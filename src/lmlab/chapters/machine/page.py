"""The machine card: measured ceilings against stated peaks, and what the machine is."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lmlab.report import bands
from lmlab.report.frame import Results, Rows, combine, select
from lmlab.report.page import Chapter
from lmlab.report.table import Column, Table, quantity
from lmlab.study.files import REFERENCES

TITLE = "The machine"


MEASURED, STATED = ["matmul_rate", "copy_bandwidth"], ["stated_matmul_rate", "stated_bandwidth"]


def derive(rows: Rows, results: Results) -> Rows:
    """Ceilings under common names (`measured`, `stated`, `share`), distinguished by `ceiling`."""
    found = select(rows, status="ok", quantity=[*MEASURED, *STATED])
    known = found["dtype"].map(lambda dtype: isinstance(dtype, str)).astype(bool)
    named = found.assign(
        ceiling=("matmul, " + found["dtype"].astype(str)).where(known, "copy, read and write"),
        quantity=found["quantity"].isin(MEASURED).map({True: "measured", False: "stated"}),
    )
    parts = {name: {"quantity": name} for name in ("measured", "stated")}
    named = combine(
        named, "share", parts, lambda p: p.measured / p.stated, on=["source", "ceiling"]
    )
    return pd.concat([rows, named], ignore_index=True)


TABLES = {
    "ceilings": Table(
        title="Ceilings: the fastest matmul and copy measured, and the vendor's dense figures",
        rows=["ceiling"],
        columns={
            "measured": quantity("measured"),
            "unit": quantity("measured", "text", field="unit"),
            "stated": quantity("stated"),
            "share": quantity("share", "percent"),
        },
    ),
    "shapes": Table(
        title="The fastest square matmul of each precision",
        rows=["dtype"],
        columns={
            "side": Column({"quantity": "matmul_rate"}, "integer", "side"),
            "TFLOP/s": quantity("matmul_rate"),
        },
    ),
    "card": Table(
        title="The machine card",
        rows=["fact"],
        where={"fact": lambda fact: isinstance(fact, str)},
        data=lambda rows: rows.assign(
            quantity="fact",
            value=[
                f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
                for value in rows["value"]
            ],
        ),
        columns={"value": quantity("fact", "text")},
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Ceilings by name, for the templates of this chapter and of others."""
    rows = chapter.own.rows
    flags = [flag for found in chapter.results.of("machine") for flag in found.flags]
    return {
        "matmul": by_dtype(rows, "matmul_rate"),
        "stated": by_dtype(rows, "stated_matmul_rate"),
        "bandwidth": chapter.value(quantity="copy_bandwidth"),
        "stated_bandwidth": chapter.value(quantity="stated_bandwidth"),
        "source": chapter.value(quantity="stated_source"),
        "power_limit_w": chapter.value(quantity="power_limit_w"),
        "memory_bytes": chapter.value(quantity="memory_bytes")
        or chapter.value(quantity="cpu_memory_bytes"),
        "gpu_count": chapter.value(quantity="gpu_count") or 0,
        "cpu": chapter.value(quantity="cpu_model"),
        "cores": chapter.value(quantity="cpu_usable_cores"),
        "sms": chapter.value(quantity="sms"),
        "power_capped": "power_capped" in flags,
        "bands": bands.against(chapter.results, bands.read(REFERENCES / "bands.yaml")),
    }


def by_dtype(rows: Rows, name: str) -> dict[str, float]:
    """A rate for each precision that was measured."""
    found = select(rows, quantity=name, status="ok")
    return dict(zip(found["dtype"], found["value"], strict=True))
