"""What the comparison of machines shows, where the front page's own tables are not enough.

Some questions have published figures of other GPUs, which come as plain records: they get a table
of plain records here. A source takes part where it states what a row of such a table needs (size,
context, precision, batch); the rest of it stays on the chapters' pages.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from lmlab.report.frame import Rows, select, table_of
from lmlab.report.table import Table, memory, quantity, time
from lmlab.report.text import GIB

NOT_STATED = "not stated"
# The column of the front page's table that is compared, where it is not the first time or share.
COLUMNS = {
    "What can this machine do?": "measured",
    "Softmax vs. matmul?": "softmax / matmuls, time",
    "What does checkpointing buy?": "step (ms)",
}
PASSES = ["forward", "backward", "total"]
TABLES = {
    "How long is a step?": Table(
        title="A training step and its passes",
        facet="precision",
        rows=["phase", "size", "batch", "context"],
        where={"start": "warm", "mode": "train_step", "phase": PASSES},
        columns={"ms": time()},
    ),
    "Is the host or the GPU the bottleneck?": Table(
        title="Forward and backward pass of a bf16 training step, milliseconds per layer",
        rows=["size", "context"],
        where={"precision": "bf16", "main": True},
        columns={"wall": quantity("per_layer", "ms", clock="wall")},
    ),
    "Where is the memory peak?": Table(
        title="Peak of a training step",
        facet="precision",
        rows=["size", "context"],
        where={"topic": "timeline", "mode": "train_step"},
        columns={"peak (GiB)": memory()},
    ),
    "How long a sequence fits with naive attention?": Table(
        title="Naive attention, batch 8; no source states its precision",
        rows=["phase", "head_dim", "sequence"],
        where={"topic": "naive", "variant": "naive", "phase": ["forward", "backward"]},
        columns={"ms": time()},
    ),
    "How fast is our FlashAttention?": Table(
        title="Forward and backward at the leaderboard's shape",
        rows=["head_dim", "variant"],
        where={"topic": "leaderboard", "phase": "both"},
        columns={"ms": time(clock="events")},
    ),
    "Which kernels take the time?": Table(
        title="Share of the kernel with the most time",
        rows=["mode", "size", "context"],
        where={"precision": "fp32", "mode": ["forward", "train_step"], "rank": 1},
        columns={"share": quantity("kernel_share", "percent")},
    ),
}


def published(rows: Rows) -> dict[str, dict[str, Rows]]:
    """Published figures as records of chapters, by GPU."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in select(rows, chapter="published").to_dict("records"):
        convert = CONVERSIONS.get(str(row["topic"]))
        for chapter, record in convert(row) if convert else ():
            base = {"chapter": chapter, "status": "ok", "unit": "", "flags": (), "source": None}
            mine = found.setdefault(str(row["gpu"]), {}).setdefault(chapter, [])
            mine.append({**base, **record})
    return {
        gpu: {chapter: _once(table_of(records)) for chapter, records in chapters.items()}
        for gpu, chapters in found.items()
        if gpu not in ("unstated", NOT_STATED)
    }


def _once(rows: Rows) -> Rows:
    """Of the kernels of one run, the one with the most time."""
    if "rank" not in rows:
        return rows
    ordered = rows.sort_values("value", ascending=False, key=pd.to_numeric)
    return ordered.drop_duplicates(["mode", "size", "context"])


Row = Mapping[Any, Any]
Records = Iterator[tuple[str, dict[str, Any]]]


def _states(row: Row, *keys: str) -> bool:
    return all(row[key] != NOT_STATED for key in keys)


def _step(row: Row) -> Records:
    phases = {"forward": "forward", "backward": "backward", "train_step": "total"}
    same_work = row["batch"] == 4 and row["compile"] == "no" and row["warmup"] == 5
    if same_work and row["phase"] in phases and _states(row, "size", "context"):
        point = {key: row[key] for key in ("size", "context", "precision", "batch")}
        mode = {"start": "warm", "mode": "train_step", "phase": phases[row["phase"]]}
        wall = {"quantity": "time", "clock": "wall", "value": row["value"]}
        yield "end_to_end", {**point, **mode, **wall}


def _peak(row: Row) -> Records:
    if _states(row, "size", "context", "mode"):
        point = {key: row[key] for key in ("size", "context", "precision", "mode")}
        peak = {"topic": "timeline", "quantity": "peak_memory", "value": row["value"] * GIB}
        yield "memory", {**point, **peak}


def _attention(row: Row) -> Records:
    naive = row["implementation"] == "eager" and row["batch"] == 8
    if naive and row["phase"] in ("forward", "backward"):
        point = {key: row[key] for key in ("head_dim", "sequence", "phase")}
        wall = {"quantity": "time", "clock": "wall", "value": row["value"]}
        yield "attention", {"topic": "naive", "variant": "naive", **point, **wall}


def _leaderboard(row: Row) -> Records:
    shape = {"topic": "leaderboard", "phase": "both", "head_dim": row["head_dim"]}
    events = {"quantity": "time", "clock": "events", "value": row["value"]}
    yield "attention", {**shape, "variant": "flash", **events}


def _kernel(row: Row) -> Records:
    point = {"mode": row["phase"], "size": row["size"], "context": row["context"]}
    share = {"quantity": "kernel_share", "value": row["value"] / 100, "precision": "fp32"}
    yield "profile", {**point, **share, "kernel": row["kernel"], "rank": 1}


def _out_of_memory(row: Row) -> Records:
    """A row without a value; what its source leaves open matches every row of the table."""
    stated = {k: row[k] for k in ("size", "context", "sequence") if _states(row, k)}
    oom = {"status": "oom", "reason": f"source {row['writeup']}"}
    if row["value"] in ("fp32", "train step"):
        step = {"start": "warm", "mode": "train_step", "batch": 4, "precision": "fp32"}
        yield "end_to_end", {**oom, **step, **stated}
    elif str(row["value"]).startswith("naive attention"):
        yield "attention", {**oom, "topic": "naive", "variant": "naive", **stated}


CONVERSIONS = {
    "end_to_end": _step,
    "memory": _peak,
    "attention": _attention,
    "leaderboard": _leaderboard,
    "kernels": _kernel,
    "out_of_memory": _out_of_memory,
}
