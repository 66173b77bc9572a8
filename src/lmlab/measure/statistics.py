"""Samples of a quantity and what they say: median, quartiles, spread, stability.

Times on a machine are skewed: nothing makes a kernel faster than the hardware, but an interrupt, a
clock change or another process makes some repetitions slower. The headline is therefore the median
with its quartiles; mean and standard deviation are kept for readers who compare with tables of
means. Raw samples are always kept, so every other statistic can be recomputed.

This module imports neither torch nor numpy: reading results must stay cheap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lmlab.measure.stability import Stability, drift, quantile, stability

Clock = Literal["wall", "events", "device"]
"""wall: host clock around synchronized work; events: CUDA events on the stream;
device: union of kernel intervals, from the profiler."""
Cache = Literal["warm", "cold"]

# A measurement whose interquartile range exceeds this share of its median is flagged as noisy.
NOISY_ABOVE = 0.10


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of one list of samples, in the samples' unit."""

    n: int
    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float
    mean: float
    sd: float | None
    """Sample standard deviation (n - 1); None for a single sample."""
    drift: float | None
    """How far the medians of the thirds of the samples lie apart; None for few samples."""
    stability: Stability

    @property
    def noisy(self) -> bool:
        return self.q3 - self.q1 > NOISY_ABOVE * self.median


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Timing samples and how they were taken."""

    samples_ms: tuple[float, ...]
    clock: Clock
    cache: Cache
    """cold: the last-level cache was overwritten before every sample."""
    stopped: str
    """Why sampling ended: "10 samples", "time cap of 120 s after 4 samples"."""

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return self.summary.median

    @property
    def noisy(self) -> bool:
        return self.summary.noisy


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize at least one finite sample, given in the order in which they were taken."""
    if not samples:
        raise ValueError("samples must not be empty")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError("samples must be finite numbers")
    ordered = sorted(samples)
    return Summary(
        n=len(ordered),
        median=statistics.median(ordered),
        q1=quantile(ordered, 0.25),
        q3=quantile(ordered, 0.75),
        minimum=ordered[0],
        maximum=ordered[-1],
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else None,
        drift=drift(samples),
        stability=stability(samples),
    )
