"""What a list of samples says: centre, spread, and whether the spread is small enough to trust.

Times on a machine are skewed: nothing makes a kernel faster than the hardware, but an interrupt,
a clock change or a neighbour makes some repetitions slower. The median and the quartiles are
therefore the headline, and mean and sample deviation stand beside them for readers who compare
with tables of means. The raw samples are always kept: every other figure can be made again from
them.

Quartiles are linear interpolations between order statistics at position (n - 1) * p, which is
numpy's default ("linear") and `statistics.quantiles(method="inclusive")`: for one sample both
quartiles are that sample. The deviation is the sample deviation (n - 1 below the line); one
sample has none, and None says so better than zero would.

This module imports neither torch nor numpy, so that reading a result stays cheap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Clock = Literal["host", "cuda_events"]
Cache = Literal["warm", "cold"]

# A row whose middle half spans more than this share of its median is marked noisy.
NOISY_ABOVE = 0.10


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The derived statistics of one list of samples, in the samples' unit."""

    n: int
    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float
    mean: float
    sd: float | None
    """Sample deviation; None for a single sample."""

    @property
    def noisy(self) -> bool:
        """True when the interquartile range exceeds a tenth of the median."""
        return self.q3 - self.q1 > NOISY_ABOVE * self.median


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one quantity with the story of how they were taken."""

    samples_ms: tuple[float, ...]
    clock: Clock
    """host: perf_counter around synchronised work; cuda_events: time stamps taken by the GPU."""
    cache: Cache
    """cold: the last-level cache was overwritten before every sample."""
    stopped: str
    """Why sampling ended, for a reader: "10 samples", "time cap of 120 s after 4 samples"."""

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return self.summary.median

    @property
    def noisy(self) -> bool:
        return self.summary.noisy

    def to_json(self) -> dict[str, Any]:
        """The measurement as it stands in a result file."""
        summary = self.summary
        return {
            "clock": self.clock,
            "cache": self.cache,
            "stopped": self.stopped,
            "samples_ms": list(self.samples_ms),
            "n": summary.n,
            "median_ms": summary.median,
            "q1_ms": summary.q1,
            "q3_ms": summary.q3,
            "min_ms": summary.minimum,
            "max_ms": summary.maximum,
            "mean_ms": summary.mean,
            "sd_ms": summary.sd,
            "noisy": summary.noisy,
        }


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise at least one finite sample."""
    if not samples:
        raise ValueError("samples: got none, at least one is needed")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError("samples: every sample must be a finite number")
    ordered = sorted(samples)
    return Summary(
        n=len(ordered),
        median=statistics.median(ordered),
        q1=_quantile(ordered, 0.25),
        q3=_quantile(ordered, 0.75),
        minimum=ordered[0],
        maximum=ordered[-1],
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else None,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
