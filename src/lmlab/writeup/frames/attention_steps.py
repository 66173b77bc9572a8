"""The eager train step of the compiled model, as other processes timed the same step.

What compiling gives is a ratio to the eager step of one process. Where the host sets the pace of
that step, another process takes another time, and the ratio with it.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention, end_to_end

KEYS = ["size", "context", "precision", "batch"]
COLUMNS = [*KEYS, "where", "other_ms"]
BESIDE_ANOTHER, END_TO_END = "beside another attention", "end to end"


def eager_elsewhere(collected: Collected, data: pd.DataFrame) -> pd.DataFrame:
    """Eager steps, with the attention that was compiled, of all processes that this page reads."""
    compiled = attention.rows_of(collected, "model_compile")
    name = compiled[0].point.settings["attention"] if compiled else None
    here = attention.measured(attention.of(data, topic="model", arm=name, pass_="train_step"))
    parts = [
        part.assign(where=where, other_ms=part["median_ms"])[COLUMNS]
        for where, part in ((BESIDE_ANOTHER, here), (END_TO_END, _end_to_end(collected, name)))
        if len(part)
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=COLUMNS)


def _end_to_end(collected: Collected, name: str | None) -> pd.DataFrame:
    other = replace(collected, rows=collected.beside.get("end_to_end", ()))
    rows = end_to_end.measured(end_to_end.grid(end_to_end.frame(other)))
    return end_to_end.of(rows, mode="train_step", phase="total", attention=name)
