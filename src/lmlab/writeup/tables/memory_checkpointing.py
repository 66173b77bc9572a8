"""Checkpointing strategies: peak, prediction, what forward keeps, and the time that it costs."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.numbers import deviation, factor, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table
from lmlab.writeup.tables.cells import time_in_words

REFERENCE_ORDER = ("none", "every-1")
"""Whose time the others' is a multiple of: the first of these that ran."""


def checkpointing(collected: Collected) -> dict[str, Table]:
    """The table, or nothing where no strategy was tried."""
    arms = frames.arms(collected)
    if not len(arms):
        return {}
    used = frames.rows_of(collected, frames.CHECKPOINTING)
    place = used[0].point.parameters
    unit, size = frames.unit_of([*arms["peak_bytes"], *arms["predicted_bytes"]])
    reference = reference_arm(arms)
    against = f"Time : {reference['name']}" if reference is not None else "Time"
    return {
        "checkpointing": Table(
            title=f"Activation checkpointing: {place['size']} at context {place['context']}, "
            f"{place['precision']}",
            columns=[
                Column("Kept for backward", "left"),
                Column(f"Peak ({unit})"),
                Column(f"Predicted ({unit})"),
                Column(f"Kept after forward ({unit})"),
                Column("Step (ms)"),
                Column(against),
            ],
            rows=[_row(arm, size, reference) for _, arm in arms.iterrows()],
            caption=f"{describe([row.result for row in used if row.result is not None])} "
            "Strategies interleaved in one process; mean ± standard deviation (median) of whole "
            "training steps, recording off.",
            sources=sources_of(used),
        )
    }


def reference_arm(arms: pd.DataFrame) -> pd.Series | None:
    """The strategy that times are compared with."""
    ran = frames.measured(arms)
    for name in REFERENCE_ORDER:
        if len(found := frames.of(ran, name=name)):
            return found.iloc[0]
    return ran.iloc[0] if len(ran) else None


def in_words(arm: pd.Series) -> str:
    """`everything`, `the input of every 4 blocks`, `halves within halves`."""
    if arm["kind"] == "none":
        return "everything"
    if arm["kind"] == "nested":
        return "nested: halves within halves"
    blocks = int(arm["blocks"])
    return "the input of every block" if blocks == 1 else f"the input of every {blocks} blocks"


def _row(arm: pd.Series, size: int, reference: pd.Series | None) -> list[str]:
    predicted = arm["predicted_bytes"]
    if arm["status"] != "ok":
        told = NOTHING if math.isnan(predicted) else significant(predicted / size, 4)
        return [in_words(arm), STATUS_CELLS[arm["status"]], told, *[NOTHING] * 3]
    told = NOTHING
    if not math.isnan(predicted):
        told = f"{significant(predicted / size, 4)} ({deviation(arm['error'])})"
    ratio = NOTHING if reference is None else factor(arm["median_ms"] / reference["median_ms"])
    return [
        in_words(arm),
        significant(arm["peak_bytes"] / size, 4),
        told,
        significant(arm["kept_bytes"] / size, 3),
        time_in_words(arm),
        ratio,
    ]
