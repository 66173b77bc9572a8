"""Cold starts step by step: when does a fresh process reach its own pace?

Each cold point is one process from its first step on; the warm-up count only says from which step
on it was measured. Its steps in order are the trace. "Settled" is judged against the process
itself: the median of the second half of its steps. What warm-up removes makes steps slower, never
faster, so a process has settled at the first step from which on none lies more than a tenth above
that median; where fewer than three steps are left to judge by, it has not settled within the trace.

Steps that were faster than the final pace are another matter: the process had settled and then
slowed down. Such a process has two paces, and a mean held against the later one says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.frames.end_to_end import cold, measured, of

TOLERANCE = 0.10
FEWEST_SETTLED_STEPS = 3


def traces(data: pd.DataFrame) -> pd.DataFrame:
    """One row a cold process: its steps, its pace, when it settles and whether it then slows."""
    rows = of(measured(cold(data)), phase="total").copy()
    rows["steps_ms"] = [
        [*before, *after]
        for before, after in zip(rows["warmup_ms"], rows["samples_ms"], strict=True)
    ]
    rows["settled_ms"] = [settled_median(steps) for steps in rows["steps_ms"]]
    rows["settles_at"] = pd.Series(
        [settling_step(steps) for steps in rows["steps_ms"]], index=rows.index, dtype=object
    )
    rows["early_ms"] = [early_median(steps) for steps in rows["steps_ms"]]
    rows["changes_pace"] = rows["early_ms"] < (1 - TOLERANCE) * rows["settled_ms"]
    return rows


def keeps_pace(rows: pd.DataFrame) -> pd.Series:
    """Which processes settle and stay at that pace: only to those can a mean be compared."""
    return rows["settles_at"].notna() & ~rows["changes_pace"]


def settled_median(steps_ms: Sequence[float]) -> float:
    """The pace that a process ends up with."""
    return statistics.median(steps_ms[_second_half(steps_ms) :])


def settling_step(steps_ms: Sequence[float]) -> int | None:
    """The first step, counted from 1, from which on none exceeds the pace by the tolerance."""
    slowest = (1 + TOLERANCE) * settled_median(steps_ms)
    slow = [number for number, ms in enumerate(steps_ms, 1) if ms > slowest]
    step = max(slow, default=0) + 1
    return step if len(steps_ms) - step + 1 >= FEWEST_SETTLED_STEPS else None


def early_median(steps_ms: Sequence[float]) -> float:
    """The pace between settling and the second half; NaN where too few steps lie between."""
    step = settling_step(steps_ms)
    early = [] if step is None else steps_ms[step - 1 : _second_half(steps_ms)]
    return statistics.median(early) if len(early) >= FEWEST_SETTLED_STEPS else math.nan


def _second_half(steps_ms: Sequence[float]) -> int:
    return len(steps_ms) // 2
