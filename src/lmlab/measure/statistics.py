"""Samples of a quantity and what they mean: median, quartiles, spread, stability.

Times on a machine are skewed: nothing makes a kernel faster than the hardware, but an interrupt, a
clock change or another process makes some repetitions slower. The headline is therefore the median
with its quartiles; mean and standard deviation are there for readers who compare with tables of
means. Raw samples are always stored, so every other statistic can be recomputed.

Samples whose level changes (a GPU warming up, a host switching between two speeds) or that fall
into two groups have no single value, so they are detected and reported as a range:

- *drifting*: the medians of the first, middle and last third differ by more than 3 %, and the rank
  correlation of the samples with their order (Spearman), or with their predecessors, is significant
  at 1 %: they rise, fall or wander, unlike random scatter;
- *bimodal*: cut at the widest gap that leaves a quarter of the samples on either side, the medians
  of the two groups differ by more than 5 % of the overall median and by more than twice the spread
  (the middle 80 %) within either. Fewer than 16 samples have gaps by chance and are not tested.

The confidence interval of the median comes from order statistics: it assumes independent samples
but no distribution.

This module imports neither torch nor numpy: reading results must stay cheap.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Clock = Literal["wall", "events", "device"]
"""wall: host clock around synchronized work; events: CUDA events on the stream;
device: union of kernel intervals, from the profiler."""
Cache = Literal["warm", "cold"]
Stability = Literal["steady", "drifting", "bimodal"]

# A measurement whose interquartile range exceeds this share of its median is flagged as noisy.
NOISY_ABOVE = 0.10
FEWEST_FOR_DRIFT, FEWEST_FOR_MODES = 10, 16
SMALLEST_DRIFT, SMALLEST_DISTANCE = 0.03, 0.05
# Two-sided 1 % point of the normal distribution.
SIGNIFICANT = 2.576


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of one list of samples, in the samples' unit, as stored in a record."""

    median: float
    n: int
    q1: float
    q3: float
    min: float
    max: float
    mean: float
    sd: float | None  # sample standard deviation (n - 1); None for a single sample
    noisy: bool
    drift: float | None
    """How far the medians of the thirds of the samples lie apart; None for few samples."""
    stability: Stability


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Timing samples and how they were taken."""

    samples_ms: tuple[float, ...]
    clock: Clock
    cache: Cache = "warm"  # cold: the last-level cache was overwritten before every sample
    stopped: str  # why sampling ended: "10 samples", "time cap of 120 s after 4 samples"

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return self.summary.median


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize at least one finite sample, given in the order in which they were taken."""
    if not samples or not all(map(math.isfinite, samples)):
        raise ValueError(f"samples must be finite numbers, at least one; got {list(samples)}")
    ordered = sorted(samples)
    median = statistics.median(ordered)
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    return Summary(
        median=median,
        n=len(ordered),
        q1=q1,
        q3=q3,
        min=ordered[0],
        max=ordered[-1],
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else None,
        noisy=q3 - q1 > NOISY_ABOVE * median,
        drift=drift(samples),
        stability=stability(samples),
    )


def stability(samples: Sequence[float]) -> Stability:
    """Classify samples, given in the order in which they were taken."""
    change = drift(samples)
    if change is not None and change > SMALLEST_DRIFT and _depends_on_order(samples):
        return "drifting"
    return "bimodal" if _has_two_groups(sorted(samples)) else "steady"


def drift(samples: Sequence[float]) -> float | None:
    """How far the medians of the first, middle and last third lie apart, relative to the smallest;
    None for too few samples, or if any is not positive."""
    n = len(samples)
    if n < FEWEST_FOR_DRIFT or min(samples) <= 0:
        return None
    thirds = (samples[: n // 3], samples[n // 3 : n - n // 3], samples[n - n // 3 :])
    medians = [statistics.median(third) for third in thirds]
    return max(medians) / min(medians) - 1


def median_error(samples: Sequence[float]) -> float:
    """Half the width of the median's 95 % confidence interval, relative to the median; infinite for
    fewer than six samples, which give no interval."""
    ordered, n = sorted(samples), len(samples)
    outside, tail = 0, 1
    while 40 * tail <= 2**n:  # both tails together at most 5 %
        outside += 1
        tail += math.comb(n, outside)
    if not outside:
        return math.inf
    return (ordered[-outside] - ordered[outside - 1]) / 2 / statistics.median(ordered)


def _depends_on_order(samples: Sequence[float]) -> bool:
    ranks = _ranks(samples)
    if len({*ranks[1:]}) == 1 or len({*ranks[:-1]}) == 1:
        return False
    trend = abs(statistics.correlation(range(len(ranks)), ranks))
    neighbours = statistics.correlation(ranks[:-1], ranks[1:])
    return max(trend, neighbours) * math.sqrt(len(ranks) - 1) > SIGNIFICANT


def _ranks(samples: Sequence[float]) -> list[float]:
    """Ranks from 0; tied samples share their mean rank."""
    ordered = sorted(samples)
    first = {value: rank for rank, value in reversed(list(enumerate(ordered)))}
    last = {value: rank for rank, value in enumerate(ordered)}
    return [(first[sample] + last[sample]) / 2 for sample in samples]


def _has_two_groups(ordered: Sequence[float]) -> bool:
    n = len(ordered)
    if n < FEWEST_FOR_MODES:
        return False
    quarter = math.ceil(n / 4)
    cut = max(range(quarter, n - quarter + 1), key=lambda i: ordered[i] - ordered[i - 1])
    low, high = ordered[:cut], ordered[cut:]
    distance = statistics.median(high) - statistics.median(low)
    spread = max(quantile(group, 0.9) - quantile(group, 0.1) for group in (low, high))
    return distance > max(SMALLEST_DISTANCE * statistics.median(ordered), 2 * spread)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted samples, interpolated linearly, as numpy does."""
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
