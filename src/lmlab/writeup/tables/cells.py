"""Cells of end-to-end tables: a number with its digits, or the reason why there is none.

A row of these tables is a place (size, context and, where it varies, batch); a cell is made from
the few frame rows that belong to that place and column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.speedup import BASE, PHASES
from lmlab.writeup.numbers import factor, fixed, mean_and_deviation, percent, significant
from lmlab.writeup.numbers import shared_decimals as decimals
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column

WITHIN_NOISE = "≈"
NOT_COUNTED = "FLOPs not known"
Cell = Callable[[pd.DataFrame], str]


def by_place(rows: pd.DataFrame, cells: Sequence[tuple[pd.DataFrame, Cell]]) -> list[list[str]]:
    """One row a size, context and batch; each cell from the rows of its own frame there."""
    parts = [(cell, dict(list(part.groupby(frames.PLACE, sort=False)))) for part, cell in cells]
    return [
        [*place, *(cell(here[key]) if key in here else NOTHING for cell, here in parts)]
        for key, place in zip(frames.places(rows), place_cells(rows), strict=True)
    ]


def at(data: pd.DataFrame, key: Sequence[Any]) -> pd.DataFrame:
    """The rows of one size, context and batch."""
    return frames.of(data, **dict(zip(frames.PLACE, key, strict=True)))


def place_columns(rows: pd.DataFrame) -> list[Column]:
    """Batch is a column only where it varies; otherwise the caption has it."""
    columns = [Column("Size", "left"), Column("Context")]
    return [*columns, Column("Batch")] if rows["batch"].nunique() > 1 else columns


def place_cells(rows: pd.DataFrame) -> list[list[str]]:
    """The leading cells of each row."""
    width = len(place_columns(rows))
    return [[str(value) for value in key[:width]] for key in frames.places(rows)]


def time_cell(part: pd.DataFrame) -> str:
    """`12.35 ± 0.12 (12.33)`, or why there is no time."""
    row = part.iloc[0]
    if math.isnan(row["median_ms"]):
        return STATUS_CELLS[row["status"]]
    return time_in_words(row)


def time_in_words(row: pd.Series) -> str:
    """Mean, deviation and median of a row that has them, to one decimal place."""
    mean, sd, median = row["mean_ms"], row["sd_ms"], row["median_ms"]
    # A median far below its mean (one slow first step) keeps three digits of its own.
    places = max(decimals(mean, sd), decimals(median, None))
    return f"{mean_and_deviation(mean, sd)} ({fixed(median, places)})"


def ratio_cell(part: pd.DataFrame) -> str:
    """Backward over forward of one point."""
    medians = part.set_index("phase")["median_ms"]
    if medians.isna().any():
        return STATUS_CELLS[part["status"].iloc[0]]
    return significant(medians["backward"] / medians["forward"], 3)


def number_cell(part: pd.DataFrame, column: str) -> str:
    """A derived number, or why there is none."""
    row = part.iloc[0]
    if row["status"] != "ok":
        return STATUS_CELLS[row["status"]]
    return NOT_COUNTED if math.isnan(row[column]) else significant(row[column], 3)


def share_cell(part: pd.DataFrame, limit: float | None, without: str) -> str:
    """The rate as a share of a limit; without a limit there is no share."""
    row = part.iloc[0]
    if row["status"] != "ok":
        return STATUS_CELLS[row["status"]]
    if math.isnan(row["tflops"]):
        return NOT_COUNTED
    return without if limit is None else percent(row["tflops"] / limit)


def busy_cell(part: pd.DataFrame) -> str:
    """The share of the phase, or why there is none."""
    row = part.iloc[0]
    if row["status"] != "ok":
        return STATUS_CELLS[row["status"]]
    return "not recorded" if math.isnan(row["busy_share"]) else percent(row["busy_share"])


def speedup_cell(
    rows: pd.DataFrame, ratio: pd.Series | None, key: Sequence[Any], what: str, precision: str
) -> str:
    """The ratio, or the status of the arm that has no time."""
    if ratio is not None:
        mark = f" {WITHIN_NOISE}" if ratio["verdict"] == "same" else ""
        return f"{factor(ratio['speedup'])}{mark}"
    mode, phase = PHASES[what]
    arms = [
        at(frames.of(rows, mode=mode, phase=phase, precision=p), key) for p in (BASE, precision)
    ]
    problems = [
        f"{name}: {STATUS_CELLS[arm['status'].iloc[0]]}"
        for name, arm in zip((BASE, precision), arms, strict=True)
        if len(arm) and arm["status"].iloc[0] != "ok"
    ]
    return ", ".join(problems) or NOTHING


def first_cell(trace: pd.DataFrame) -> str:
    """The first step that counted, as a time and as a multiple of the settled pace."""
    if not len(trace):
        return NOTHING
    row = trace.iloc[0]
    first = row["samples_ms"][0]
    return f"{significant(first)} ({factor(first / row['settled_ms'])})"


def settle_cell(trace: pd.DataFrame) -> str:
    """The step from which on the process keeps its pace, and whether it slows down after all."""
    if not len(trace):
        return NOTHING
    row = trace.iloc[0]
    if row["settles_at"] is None:
        return f"not within {len(row['steps_ms'])}"
    return f"{row['settles_at']}, then slower" if row["changes_pace"] else str(row["settles_at"])
