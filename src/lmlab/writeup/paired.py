"""Is one arm as fast as another, told with an interval: rounds compared one by one.

Arms that took turns are compared within a round, where drift hits both alike. The ratio of a round
says nothing by itself; many of them have a mean and a scatter. Ratios multiply, so the mean is that
of their logarithms, and Student's t gives the interval in which the true ratio lies with 95 %
confidence. A claim ("at most 5 % slower") holds if the whole interval does, fails if none of it
does, and is AMBIGUOUS otherwise: more rounds would decide it, a rounder number would not.
What one arm saves in milliseconds is held against other milliseconds; such differences add, so
their mean is the plain one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "AMBIGUOUS"]

CONFIDENCE = 0.95
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the next lower one is used,
# which makes an interval wider and never narrower.
T_QUANTILES = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 20: 2.086, 25: 2.060,
    30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True)
class RatioInterval:
    """The ratio of two arms, and where it lies with 95 % confidence."""

    ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class DifferenceInterval:
    """By how much two arms differ, and where that lies with 95 % confidence."""

    difference: float
    low: float
    high: float
    rounds: int


def ratio_interval(arm: Sequence[float], base: Sequence[float]) -> RatioInterval | None:
    """Arm over base, round by round; None with fewer than two rounds."""
    logs = [math.log(a / b) for a, b in zip(arm, base, strict=True)]
    if len(logs) < 2:
        return None
    ratio, low, high = (math.exp(value) for value in _mean_and_ends(logs))
    return RatioInterval(ratio, low, high, len(logs))


def difference_interval(arm: Sequence[float], base: Sequence[float]) -> DifferenceInterval | None:
    """Arm less base, round by round; None with fewer than two rounds."""
    differences = [a - b for a, b in zip(arm, base, strict=True)]
    if len(differences) < 2:
        return None
    return DifferenceInterval(*_mean_and_ends(differences), len(differences))


def _mean_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two values or more, and both ends of Student's interval around it."""
    centre = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return centre, centre - half, centre + half


def t_quantile(freedom: int) -> float:
    """The quantile of the largest tabled number of degrees of freedom that is not above this."""
    return T_QUANTILES[max(known for known in T_QUANTILES if known <= freedom)]


def judge(interval: RatioInterval, limit: float) -> Verdict:
    """Whether the ratio is at most the limit."""
    if interval.high <= limit:
        return "pass"
    return "fail" if interval.low > limit else "AMBIGUOUS"
