"""When a kernel, or a step, has been repeated often enough.

A fixed number of repetitions is too many for a kernel of a second and too few for one of ten
microseconds. Following nvbench, sampling stops when there are enough samples for a meaningful
deviation, enough accumulated time for clocks and power to settle, and a relative deviation (sample
standard deviation over mean) below a target. A kernel that stays noisier is stopped by a time cap
or a sample cap. The reason is recorded with the samples, because "settled at 0.5 %" and "gave up
after 5 s" are different statements about a number.

The deviation is updated by Welford's recurrence: one pass, constant cost per sample, and no
cancellation when the deviation is a thousandth of the mean.

A step of a model takes milliseconds to seconds and its samples are skewed by the host, so it is
repeated until its median is known well enough, or a number of steps or seconds is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmlab.measure.stability import median_error


@dataclass(kw_only=True)
class StopRule:
    """Feed it samples with `add`; `reason` is None while sampling should continue."""

    min_samples: int
    min_time_s: float
    target_relative_deviation: float
    time_cap_s: float
    max_samples: int
    n: int = field(default=0, init=False)
    _mean: float = field(default=0.0, init=False)
    _squares: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.min_samples < 1:
            raise ValueError(f"min_samples must be at least 1, got {self.min_samples}")
        if self.max_samples < self.min_samples:
            raise ValueError(
                f"max_samples must be at least min_samples ({self.min_samples}), "
                f"got {self.max_samples}"
            )
        if self.time_cap_s <= 0:
            raise ValueError(f"time_cap_s must be more than 0, got {self.time_cap_s:g}")

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
        if self._settled():
            return f"relative deviation {self.relative_deviation:.2%} after {count_samples(self.n)}"
        if self.n >= self.max_samples:
            return f"sample cap of {self.max_samples}"
        if self.n and elapsed_s >= self.time_cap_s:
            return f"time cap of {self.time_cap_s:g} s after {count_samples(self.n)}"
        return None

    def _settled(self) -> bool:
        return (
            self.n >= self.min_samples
            and self.measured_s >= self.min_time_s
            and self.relative_deviation < self.target_relative_deviation
        )


@dataclass(frozen=True, kw_only=True)
class MedianRule:
    """Stop once the median of at least `steps` samples is known within `interval`, relatively and
    with 95 % confidence, or at `max_steps`, or at the time cap if there is a sample."""

    steps: int
    max_steps: int
    interval: float
    time_cap_s: float

    def __post_init__(self) -> None:
        for key, least in (("steps", 1), ("max_steps", self.steps), ("interval", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, got {getattr(self, key)}")
        if self.time_cap_s <= 0:
            raise ValueError(f"time_cap_s must be more than 0, got {self.time_cap_s:g}")

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


def count_samples(n: int) -> str:
    """ "1 sample" or "4 samples", for stop reasons."""
    return "1 sample" if n == 1 else f"{n} samples"
