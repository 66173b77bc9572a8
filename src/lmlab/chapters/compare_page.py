"""Tables and columns of the machine comparison, where the front page's own do not suffice.

Published figures of other GPUs exist only as raw records, so questions that have any get a table of
raw records here. A source is included where it states everything a row of such a table needs (size,
context, precision, batch); its other figures appear only on the chapters' pages.
"""

from collections.abc import Callable
from typing import Any

import pandas as pd

from lmlab.report.frame import Rows, select
from lmlab.report.table import Table, memory, quantity, time
from lmlab.report.text import GIB, NOT_STATED

# The column of the front page's table to compare, if not its first time or share column.
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
    """Published figures as chapter rows, by GPU and chapter."""
    known = select(rows, chapter="published", gpu=lambda gpu: gpu not in ("unstated", NOT_STATED))
    if known.empty:
        return {}
    topics = {topic: select(known, topic=topic) for topic in CONVERSIONS}
    found = [CONVERSIONS[topic](mine) for topic, mine in topics.items() if len(mine)]
    return {
        str(gpu): {str(chapter): each for chapter, each in mine.groupby("chapter", sort=False)}
        for gpu, mine in pd.concat([known.head(0), *found]).groupby("gpu", sort=False)
    }


WALL = {"quantity": "time", "clock": "wall"}
EAGER = {"implementation": "eager", "batch": 8, "phase": ["forward", "backward"]}
NAIVE = {"chapter": "attention", "topic": "naive", "variant": "naive"}
FLASH = {"chapter": "attention", "variant": "flash", "phase": "both"}
FLASH |= {"quantity": "time", "clock": "events"}
STEP = {"chapter": "end_to_end", "start": "warm", "mode": "train_step"}


def _stated(value: Any) -> bool:
    return bool(value != NOT_STATED)


def _steps(rows: Rows) -> Rows:
    phases = {"forward": "forward", "backward": "backward", "train_step": "total"}
    same_work = {"batch": 4, "compile": "no", "warmup": 5, "phase": list(phases)}
    rows = select(rows, size=_stated, context=_stated, **same_work)
    return rows.assign(phase=rows["phase"].map(phases), **STEP, **WALL)


def _kernels(rows: Rows) -> Rows:
    """The share of the kernel that takes the most time in each run."""
    rows = rows.sort_values("value", ascending=False, key=pd.to_numeric)
    rows = rows.drop_duplicates(["gpu", "phase", "size", "context"])
    rows = rows.assign(quantity="kernel_share", value=rows["value"] / 100, rank=1)
    return rows.assign(chapter="profile", mode=rows["phase"], precision="fp32")


def _peaks(rows: Rows) -> Rows:
    rows = select(rows, size=_stated, context=_stated, mode=_stated)
    rows = rows.assign(quantity="peak_memory", value=rows["value"] * GIB)
    return rows.assign(chapter="memory", topic="timeline")


def _out_of_memory(rows: Rows) -> Rows:
    """Out-of-memory rows; a label that their source does not state matches every table row."""
    steps = select(rows, value=["fp32", "train step"], size=_stated).assign(**STEP)
    steps = steps.assign(precision=steps["value"].where(steps["value"] == "fp32"))
    naive = select(rows, value=lambda what: str(what).startswith("naive attention"))
    found = pd.concat([steps, naive.assign(**NAIVE)]).replace(NOT_STATED, None)
    nothing = dict.fromkeys(["quantity", "value", "head_dim"])
    return found.assign(status="oom", reason="source " + found["writeup"], **nothing)


CONVERSIONS: dict[str, Callable[[Rows], Rows]] = {
    "attention": lambda rows: select(rows, **EAGER).assign(**NAIVE, **WALL),
    "end_to_end": _steps,
    "kernels": _kernels,
    "leaderboard": lambda rows: rows.assign(**FLASH),
    "memory": _peaks,
    "out_of_memory": _out_of_memory,
}
