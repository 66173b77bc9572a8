"""When to stop repeating a kernel or a step.

Following nvbench, sampling of a kernel stops when there are enough samples for a meaningful
deviation, enough accumulated time for clocks and power to settle, and a relative deviation (sample
standard deviation over mean) below a target. A kernel that stays noisier is stopped by a time cap
or a sample cap. The reason is recorded with the samples, because "settled at 0.5 %" and "gave up
after 5 s" are different statements about a number.

A step of a model takes milliseconds to seconds and its samples are skewed by the host, so it is
repeated until its median is known well enough, or until a step cap or time cap is reached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.measure.statistics import median_error


@dataclass(frozen=True, kw_only=True)
class SamplingBudget:
    """How long a kernel is sampled."""

    min_samples: int = 10
    min_time_s: float = 0.01
    target_relative_deviation: float = 0.005
    max_samples: int = 40
    time_cap_s: float = 0.2  # over all turns of a variant; one sample is always taken

    def __post_init__(self) -> None:
        _check(self, min_samples=1, max_samples=self.min_samples)


class StopRule:
    """Feed it samples with `add`; `reason` is None while sampling should continue."""

    def __init__(self, budget: SamplingBudget) -> None:
        self.budget = budget
        self.n = 0
        self._mean = self._squares = 0.0

    def add(self, sample_ms: float) -> None:
        self.n += 1
        from_old_mean = sample_ms - self._mean
        self._mean += from_old_mean / self.n
        self._squares += from_old_mean * (sample_ms - self._mean)

    @property
    def measured_s(self) -> float:
        """Accumulated sample time, without flushes and launches in between."""
        return self._mean * self.n / 1e3

    @property
    def relative_deviation(self) -> float:
        """Sample standard deviation over mean; infinite with fewer than two samples."""
        if self.n < 2 or self._mean <= 0:
            return math.inf
        return math.sqrt(self._squares / (self.n - 1)) / self._mean

    def reason(self, elapsed_s: float) -> str | None:
        """Why to stop now, given the wall time since sampling began; None to continue."""
        enough = self.n >= self.budget.min_samples and self.measured_s >= self.budget.min_time_s
        if enough and self.relative_deviation < self.budget.target_relative_deviation:
            return f"relative deviation {self.relative_deviation:.2%} after {count_samples(self.n)}"
        if self.n >= self.budget.max_samples:
            return f"sample cap of {self.budget.max_samples}"
        if self.n and elapsed_s >= self.budget.time_cap_s:
            return f"time cap of {self.budget.time_cap_s:g} s after {count_samples(self.n)}"
        return None


@dataclass(frozen=True, kw_only=True)
class MedianRule:
    """Stop once at least `steps` samples give a median known to within `interval` (relative, 95 %
    confidence), or at `max_steps`, or at the time cap if there is a sample."""

    steps: int
    max_steps: int
    interval: float
    time_cap_s: float

    def __post_init__(self) -> None:
        _check(self, steps=1, max_steps=self.steps, interval=0)

    def reason(self, samples_ms: Sequence[float], elapsed_s: float) -> str | None:
        """Why to stop now, given the wall time since the first step; None to continue."""
        n, count = len(samples_ms), count_samples(len(samples_ms))
        if n >= self.steps and self.steps < self.max_steps:
            error = median_error(samples_ms)
            if error <= self.interval:
                return f"median within {error:.2%} after {count}"
            if n >= self.max_steps:
                return f"step cap, median within {error:.2%} after {count}"
        elif n >= self.steps:
            return count
        if n and elapsed_s >= self.time_cap_s:
            return f"time cap of {self.time_cap_s:g} s after {count}"
        return None


def _check(rule: Any, **least: int) -> None:
    for key, smallest in least.items():
        if getattr(rule, key) < smallest:
            raise ValueError(f"{key} must be at least {smallest}, got {getattr(rule, key)}")
    if rule.time_cap_s <= 0:
        raise ValueError(f"time_cap_s must be more than 0, got {rule.time_cap_s:g}")


def count_samples(n: int) -> str:
    """The sample count in stop reasons: "1 sample", "4 samples"."""
    return "1 sample" if n == 1 else f"{n} samples"
