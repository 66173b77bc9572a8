"""Is one arm faster than another, or is that noise?

Two medians always differ. Each is therefore taken with its quartiles, and one arm counts as faster
only when the middle halves of the samples do not touch. Points are measured in different processes,
minutes apart, and there the same work differs with nothing changed, which samples of one process
cannot show. Across points the middle halves must therefore stay apart by a margin as well: what the
study's own repeated measurements differ by, and 2 % where they agree better than that. What is
neither faster nor slower stays "same": a verdict that allows for doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

Verdict = Literal["faster", "slower", "same"]

# Between two processes on one machine, with nothing changed, at the very least.
ACROSS_POINTS = 0.02
FEWEST_SAMPLES, FEW_SAMPLES_APART = 4, 0.05
"""Fewer samples have no middle half to speak of: such times must lie so far apart to differ."""


@dataclass(frozen=True)
class Timed:
    """A median with the middle half of its samples."""

    median: float
    q1: float
    q3: float


def verdict(arm: Timed, base: Timed, *, margin: float = ACROSS_POINTS) -> Verdict:
    """How the arm compares with the base."""
    if arm.q3 * (1 + margin) < base.q1:
        return "faster"
    if base.q3 * (1 + margin) < arm.q1:
        return "slower"
    return "same"


def margin_of(*counts: float, enough: float = 0.0) -> float:
    """By how much middle halves of so many samples must stay apart, `enough` if they are many."""
    return FEW_SAMPLES_APART if min(counts) < FEWEST_SAMPLES else enough


def agree(one: Timed, other: Timed, *, margin: float) -> bool:
    """Whether two measurements of the same quantity could be of the same quantity."""
    difference = abs(one.median - other.median)
    noise = (one.q3 - one.q1) + (other.q3 - other.q1)
    return difference <= max(noise, margin * max(one.median, other.median))


def timed(row: pd.Series, suffix: str = "") -> Timed:
    """The median and quartiles of a frame's row."""
    return Timed(*(float(row[f"{name}{suffix}"]) for name in ("median_ms", "q1_ms", "q3_ms")))


def with_verdicts(pairs: pd.DataFrame, margins: Sequence[float]) -> pd.DataFrame:
    """Arm `_b` against base `_a` of the same row: how much faster, and whether beyond noise."""
    verdicts = [
        verdict(timed(row, "_b"), timed(row, "_a"), margin=margin)
        for (_, row), margin in zip(pairs.iterrows(), margins, strict=True)
    ]
    return pairs.assign(
        speedup=pairs["median_ms_a"] / pairs["median_ms_b"],
        verdict=pd.Series(verdicts, index=pairs.index, dtype=object),
    )
