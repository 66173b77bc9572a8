"""When a variant counts as faster: one rule for the whole project.

The ratio is baseline over variant, so more than 1 means the variant is faster. Its 95 % interval
decides the verdict:

- faster or slower: the interval excludes 1 and the difference exceeds 2 %,
- same: the whole interval lies within 2 % of 1,
- undecided: anything else.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from scipy.special import stdtrit

CONFIDENCE = 0.95
SMALLEST_DIFFERENCE = 0.02
# Cap on the half width of a log interval: uninformative beyond it, and exp would soon overflow.
WIDEST = 100.0
FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", "same", "undecided"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio with its confidence interval."""

    ratio: float
    low: float
    high: float

    @cached_property
    def verdict(self) -> str:
        above, below = 1 + SMALLEST_DIFFERENCE, 1 / (1 + SMALLEST_DIFFERENCE)
        if not math.isfinite(self.low + self.high):
            return UNDECIDED
        if self.low > 1 and self.ratio > above:
            return FASTER
        if self.high < 1 and self.ratio < below:
            return SLOWER
        return SAME if below <= self.low and self.high <= above else UNDECIDED

    @property
    def decided(self) -> bool:
        """Whether the ratio may be quoted as a difference."""
        return self.verdict in (FASTER, SLOWER)


def interval(ratio: float, error: float, df: float) -> Interval:
    """Interval of a ratio from the standard error of its logarithm; unbounded without one."""
    if not math.isfinite(error) or df < 1:
        return Interval(ratio=ratio, low=0.0, high=math.inf)
    half = min(stdtrit(df, (1 + CONFIDENCE) / 2) * error, WIDEST)
    return Interval(ratio=ratio, low=ratio * math.exp(-half), high=ratio * math.exp(half))
