"""Cold starts step by step: when does a fresh process reach its own pace?

Each cold point is one process from its first step on; the warm-up count only says from which step
on it was measured. Its steps in order are the trace. "Settled" is judged against the process
itself: the median of the second half of its steps. A process has settled at the first step after
which all others stay within a tenth of that median; where fewer than three steps are left to judge
by, it has not settled within the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.frames.end_to_end import cold, measured, of

TOLERANCE = 0.10
FEWEST_SETTLED_STEPS = 3


def traces(data: pd.DataFrame) -> pd.DataFrame:
    """One row a cold process: all its steps, the settled median, the step at which it settles."""
    rows = of(measured(cold(data)), phase="total").copy()
    rows["steps_ms"] = [
        [*before, *after]
        for before, after in zip(rows["warmup_ms"], rows["samples_ms"], strict=True)
    ]
    rows["settled_ms"] = [settled_median(steps) for steps in rows["steps_ms"]]
    rows["settles_at"] = pd.Series(
        [settling_step(steps) for steps in rows["steps_ms"]], index=rows.index, dtype=object
    )
    return rows


def settled_median(steps_ms: Sequence[float]) -> float:
    """The pace that a process ends up with."""
    return statistics.median(steps_ms[len(steps_ms) // 2 :])


def settling_step(steps_ms: Sequence[float]) -> int | None:
    """The first step, counted from 1, from which on all stay within the tolerance."""
    settled = settled_median(steps_ms)
    off = [i for i, ms in enumerate(steps_ms, 1) if abs(ms - settled) > TOLERANCE * settled]
    step = max(off, default=0) + 1
    return step if len(steps_ms) - step + 1 >= FEWEST_SETTLED_STEPS else None
