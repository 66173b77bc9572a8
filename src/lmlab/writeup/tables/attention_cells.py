"""Cells of the attention tables: a number of one arm and pass, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Row
from lmlab.writeup.frames.attention import STATUSES, known, not_there
from lmlab.writeup.numbers import binary_bytes, factor, fixed, mean_and_deviation, significant
from lmlab.writeup.numbers import shared_decimals as decimals
from lmlab.writeup.table import NOTHING
from lmlab.writeup.tables.cells import WITHIN_NOISE

NOT_COUNTED = "not counted"


def time_cell(part: pd.DataFrame) -> str:
    """`12.35 ± 0.12 (12.33)`, or why there is no time."""
    if not len(part):
        return NOTHING
    row = part.iloc[0]
    if math.isnan(row["median_ms"]):
        return STATUSES[row["status"]]
    mean, sd, median = row["mean_ms"], row["sd_ms"], row["median_ms"]
    places = max(decimals(mean, sd), decimals(median, None))
    return f"{mean_and_deviation(mean, sd)} ({fixed(median, places)})"


def median_cell(part: pd.DataFrame, column: str = "median_ms") -> str:
    """A median or its rate to three digits, or why there is none."""
    if not len(part):
        return NOTHING
    row = part.iloc[0]
    return STATUSES[row["status"]] if math.isnan(row[column]) else significant(row[column])


def bytes_cell(part: pd.DataFrame, column: str) -> str:
    """Bytes in a binary unit; on a CPU nobody counts them."""
    if not len(part):
        return NOTHING
    row = part.iloc[0]
    if row["status"] != "ok":
        return STATUSES[row["status"]]
    return NOT_COUNTED if row[column] is None else binary_bytes(float(row[column]))


def seconds_cell(part: pd.DataFrame, column: str) -> str:
    """Seconds to three digits."""
    if not len(part) or part.iloc[0][column] is None:
        return NOTHING if not len(part) else STATUSES[part.iloc[0]["status"]]
    return significant(float(part.iloc[0][column]))


def speedup_cell(ratios: pd.DataFrame) -> str:
    """`2.31×`, marked where it is within noise."""
    if not len(ratios):
        return NOTHING
    row = ratios.iloc[0]
    mark = f" {WITHIN_NOISE}" if row["verdict"] == "same" else ""
    return f"{factor(row['speedup'])}{mark}"


def caption(rows: Iterable[Row]) -> str:
    """From the results behind a table."""
    return describe([row.result for row in rows if row.result is not None])


def left_out(rows: pd.DataFrame, noun: str) -> str:
    """A last sentence of a caption: which rows are not there."""
    gone = not_there(rows, noun)
    return f" {gone} and left out." if gone and len(known(rows)) < len(rows) else ""
