"""The published table: other GPUs beside this one, where the same model was timed.

One row a publication and context, one column a size, so that five sources fit on a screen. Ours
stands first at each context and is filled in only where size, context and batch can be the same: a
publication that does not state its context has no counterpart here, and none is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.numbers import significant
from lmlab.writeup.references import NOT_STATED, NOTES, published_times, stated
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

PRECISION = "fp32"
WARMUP = 5


def published(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """The table, or nothing where no publication has a size of this study on a GPU."""
    ours = frames.of(
        frames.grid(data), precision=PRECISION, warmup=WARMUP, mode="train_step", batch=_batch(data)
    )
    theirs = published_times(collected.references, precision=PRECISION, warmup=WARMUP)
    theirs = theirs[
        theirs["size"].isin(set(ours["size"])) & theirs["batch"].isin({"", str(_batch(data))})
    ]
    if collected.device != "cuda" or not len(theirs):
        return {}
    sizes = [size for size in frames.order(ours, "size") if size in set(theirs["size"])]
    return {"published": _table(collected, ours, theirs, sizes)}


def _batch(data: pd.DataFrame) -> Any:
    """Publications use one batch; a study of several is compared at its first."""
    return frames.order(frames.grid(data), "batch")[0] if len(frames.grid(data)) else None


def _table(
    collected: Collected, ours: pd.DataFrame, theirs: pd.DataFrame, sizes: Sequence[str]
) -> Table:
    body: list[list[str]] = []
    for context in [*map(str, frames.order(ours, "context")), ""]:
        rows = theirs[theirs["context"] == context]
        if not len(rows):
            continue
        if context:
            body.append(_our_row(collected, frames.of(ours, context=int(context)), sizes))
        body += [
            _their_row(key, part, sizes)
            for key, part in rows.groupby(["source", "gpu", "context", "batch"], sort=True)
        ]
    notes = [NOTES[source] for source in sorted(set(theirs["source"])) if source in NOTES]
    used = [
        row
        for row in collected.rows
        if row.point.parameters["start"] == "warm"
        and row.point.parameters["mode"] == "train_step"
        and row.point.parameters["precision"] == PRECISION
    ]
    return Table(
        title=f"Published beside measured: mean forward / backward in ms, {PRECISION}, "
        f"{WARMUP} warm-ups",
        columns=[
            Column("GPU", "left"),
            Column("Publication", "left"),
            Column("Context"),
            Column("Batch"),
            *(Column(size) for size in sizes),
        ],
        rows=body,
        caption=f"Publications are numbered as in report/references. {_sentence(notes)}",
        sources=[*sources_of(used), "report/references/end_to_end.csv"],
    )


def _our_row(collected: Collected, here: pd.DataFrame, sizes: Sequence[str]) -> list[str]:
    cells = [_our_cell(frames.of(here, size=size)) for size in sizes]
    context, batch = str(here["context"].iloc[0]), str(here["batch"].iloc[0])
    return [collected.device_name, "this page", context, batch, *cells]


def _our_cell(point: pd.DataFrame) -> str:
    phases = [frames.of(point, phase=phase) for phase in ("forward", "backward")]
    if any(not len(frames.measured(part)) for part in phases):
        return STATUS_CELLS[point["status"].iloc[0]] if len(point) else NOTHING
    return " / ".join(significant(part["mean_ms"].iloc[0], 4) for part in phases)


def _their_row(key: Any, part: pd.DataFrame, sizes: Sequence[str]) -> list[str]:
    source, gpu, context, batch = (stated(str(value)) for value in key)
    cells = [_their_cell(part[part["size"] == size]) for size in sizes]
    return [f"GPU {NOT_STATED}" if gpu == NOT_STATED else gpu, source, context, batch, *cells]


def _their_cell(rows: pd.DataFrame) -> str:
    if not len(rows):
        return NOT_STATED
    return " / ".join(_their_time(rows[rows["phase"] == p]) for p in ("forward", "backward"))


def _their_time(rows: pd.DataFrame) -> str:
    return significant(float(rows["mean_ms"].iloc[0]), 4) if len(rows) else NOT_STATED


def _sentence(notes: Sequence[str]) -> str:
    text = "; ".join(notes)
    return f"{text[0].upper()}{text[1:]}." if text else ""
