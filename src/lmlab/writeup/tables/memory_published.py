"""Published peaks of the same models on other GPUs, ours first at every context and precision.

What publications call the peak of a forward pass is the pass that keeps its graph; ours shows both.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import MODES
from lmlab.writeup.numbers import significant, span
from lmlab.writeup.references import (
    NOT_STATED,
    NOTES,
    published_failures,
    published_peaks,
    stated,
)
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

GIB = 2**30
THEIR_MODES = {"forward_graph": "forward", "train_step": "train_step"}
"""Ours by the name that publications use."""


def published(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """The table, or nothing where no publication has a size of this study on a GPU."""
    theirs = published_peaks(collected.references)
    theirs = theirs[theirs["size"].isin({str(size) for size in data["size"]})]
    if collected.device != "cuda" or not len(theirs):
        return {}
    rows = []
    for key, part in theirs.groupby(["size", "context", "precision"], sort=False):
        ours = _our_row(collected, data, *map(str, key))
        rows += [*([ours] if ours else []), *_their_rows(part)]
    notes = [NOTES[source] for source in sorted(set(theirs["source"])) if source in NOTES]
    return {
        "published": Table(
            title="Published beside measured: peak memory (GiB)",
            columns=[
                Column("GPU", "left"),
                Column("Publication", "left"),
                Column("Size", "left"),
                Column("Context"),
                Column("Precision", "left"),
                *(Column(name.capitalize()) for name in MODES.values()),
                Column("Mode not stated"),
            ],
            rows=rows,
            caption="Publications are numbered as in report/references; their forward pass is "
            "taken for the one that keeps its graph. Batches are not stated there."
            + (f" {'; '.join(notes).capitalize()}." if notes else ""),
            sources=[
                *sources_of(frames.rows_of(collected, frames.TIMELINE)),
                "report/references/memory.csv",
            ],
        )
    }


def too_large(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """What publications could not fit, and what a training step of it takes here."""
    theirs = published_failures(collected.references)
    theirs = theirs[theirs["size"].isin({str(size) for size in data["size"]})]
    if collected.device != "cuda" or not len(theirs):
        return {}
    rows = [
        [
            *(stated(str(row[key])) for key in ("gpu", "source", "what", "size", "context")),
            _range_here(data, str(row["size"]), str(row["context"])),
        ]
        for _, row in theirs.iterrows()
    ]
    titles = ("GPU", "Publication", "What did not fit", "Size", "Context")
    return {
        "too_large": Table(
            title="What publications report as too large for their GPU",
            columns=[*(Column(title, "left") for title in titles), Column("Training step here")],
            rows=rows,
            caption=f"Peaks of {collected.device_name} in {frames.BASE} at the same context, or "
            "over all contexts where none is stated.",
            sources=[
                *sources_of(frames.rows_of(collected, frames.TIMELINE)),
                "report/references/out_of_memory.csv",
            ],
        )
    }


def _range_here(data: pd.DataFrame, size: str, context: str) -> str:
    rows = frames.of(data, size=size, precision=frames.BASE, mode="train_step")
    rows = frames.of(rows, context=int(context)) if context else rows
    ran = frames.measured(rows)
    if not len(ran):
        return STATUS_CELLS[rows["status"].iloc[0]] if len(rows) else NOTHING
    return f"{span(ran['peak_bytes'] / GIB)} GiB"


def _our_row(
    collected: Collected, data: pd.DataFrame, size: str, context: str, precision: str
) -> list[str] | None:
    """Ours at the same place; None where the publication does not state one."""
    if not context:
        return None
    here = frames.of(data, size=size, context=int(context), precision=precision)
    if not len(here):
        return None
    cells = [_our_cell(frames.of(here, mode=mode).iloc[0]) for mode in MODES]
    return [collected.device_name, "this page", size, context, precision, *cells, NOTHING]


def _our_cell(row: pd.Series) -> str:
    if row["status"] != "ok":
        return STATUS_CELLS[row["status"]]
    return significant(row["peak_bytes"] / GIB, 4)


def _their_rows(part: pd.DataFrame) -> list[list[str]]:
    rows = []
    for key, each in part.groupby(["source", "gpu", "size", "context", "precision"], sort=True):
        source, gpu, size, context, precision = (stated(str(value)) for value in key)
        by_mode = {row["mode"]: str(row["peak_gib"]) for _, row in each.iterrows()}
        cells = [
            by_mode.get(THEIR_MODES[mode], NOT_STATED) if mode in THEIR_MODES else NOTHING
            for mode in MODES
        ]
        rows.append([gpu, source, size, context, precision, *cells, by_mode.get("", NOTHING)])
    return rows
