"""Tile sizes of our kernels: all that were tried, the fastest, the chosen one, those untimed."""

from typing import Any

import pandas as pd

from lmlab.chapters.machine.page import kernel_time
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Rows, derived, select
from lmlab.report.table import Table, quantity

CHOSEN = "chosen"
SHAPE = ["head_dim", "sequence"]


def tried(rows: Rows, **where: Any) -> Rows:
    """Times of tile sizes other than the chosen one."""
    return select(rows, topic="tiles", quantity="time", variant=lambda v: v != CHOSEN, **where)


def best(rows: Rows) -> Rows:
    """The fastest tile of every direction, head dimension and sequence, next to the chosen one."""
    key = ["direction", *SHAPE]
    ok = tried(rows, status="ok").sort_values("value", key=pd.to_numeric, kind="stable")
    fastest = ok.drop_duplicates(key).sort_index().assign(quantity="best_time")
    failed = tried(rows, status=lambda status: status != "ok").groupby(key).size().to_dict()
    counts = pd.MultiIndex.from_frame(fastest[key]).map(failed).fillna(0)
    chosen = select(rows, topic="tiles", quantity="time", variant=CHOSEN)
    return pd.concat([derived(fastest, "untimed", {}, lambda _: counts), chosen])


def untimed(rows: Rows) -> Rows:
    """Tile sizes without a time, one row each for all sequences."""
    found = tried(rows, status=lambda status: status != "ok")
    found = found.drop_duplicates(["direction", "head_dim", "block_m", "block_n"])
    return found.assign(quantity="why", value=found["reason"], status="ok")


def at_largest(rows: Rows) -> Rows:
    """All tiles at the largest head dimension and the longest sequence."""
    rows = select(rows, topic="tiles")
    for field in SHAPE:
        rows = rows[rows[field] == rows[field].max()]
    return rows


TABLES = {
    "tiles_best": Table(
        title="Fastest plain tile (BLOCK_M x BLOCK_N) and the chosen kernel, {direction}",
        rows=SHAPE,
        data=best,
        columns={
            "fastest tile": quantity("best_time", "text", "variant"),
            "its time (ms)": quantity("best_time", "ms"),
            "chosen kernel (ms)": kernel_time(),
            "sizes without a time": quantity("untimed", "integer"),
        },
    ),
    "tiles_untimed": Table(
        title="Tile sizes without a time",
        rows=["direction", "head_dim", "block_m", "block_n"],
        data=untimed,
        columns={"reason": quantity("why", "text")},
    ),
    "tiles": Table(
        title="All tile sizes at the largest head dimension and the longest sequence, {direction}",
        rows=[*SHAPE, "block_m", "block_n", "num_warps", "kernel"],
        data=at_largest,
        columns={
            "time (ms)": kernel_time(),
            "shared memory (KiB)": quantity("shared_memory", "KiB"),
            "estimated (KiB)": quantity("estimated_shared_memory", "KiB"),
            "registers": quantity("registers", "integer"),
            "spills": quantity("spills", "integer"),
        },
    ),
}
FIGURES = {
    "tiles": Figure(
        title="Plain kernels by tile, largest head dim and longest sequence: ms (blank: no time)",
        mark="heatmap",
        facet="direction",
        x=Axis(field="block_n", title="BLOCK_N (keys)", categorical=True),
        y=Axis(field="block_m", title="BLOCK_M (queries)", categorical=True),
        data=lambda results: tried(at_largest(results.rows), status="ok"),
        share_y=False,
    )
}
