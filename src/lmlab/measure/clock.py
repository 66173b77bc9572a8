"""Host clock for model steps; single kernels are timed by `kernel_clock`.

A GPU works asynchronously, so each edge of a phase first waits for the device and then reads
`perf_counter_ns`: the time between two edges is what a user waits for, launch gaps included.
Warm-up and measured steps run in the same loop; without warm-up, the first sample really is the
cold step, with its kernel loading, allocator growth and autotuning.

Before a clock starts, Python's garbage collector runs once and is then frozen and disabled: a
collection in mid-step costs milliseconds, at a moment that depends on unrelated objects.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import MedianRule
from lmlab.measure.time_spent import measuring

TOTAL = "total"


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device; a no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect once, then keep the garbage collector from running until the block ends."""
    was_enabled = gc.isenabled()
    frozen_before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen_before:  # objects frozen earlier stay frozen
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class PhaseClock:
    """Times the named phases of each step; the device is idle at every edge."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._edges: list[tuple[str, int, int]] = []
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name`; a name used twice in a step adds up."""
        if name == TOTAL:
            raise ValueError(f"phase: {TOTAL!r} is the whole step, choose another name")
        if self._open is not None:
            raise ValueError(f"phase: {name!r} opened inside {self._open!r}, phases do not nest")
        self._open = name
        try:
            synchronize(self._device)
            start = time.perf_counter_ns()
            yield
            synchronize(self._device)
            self._edges.append((name, start, time.perf_counter_ns()))
        finally:
            self._open = None

    def take_step_ms(self) -> dict[str, float]:
        """Times of the last step's phases and, from first to last edge, its total; resets."""
        if not self._edges:
            raise ValueError("step timed no phase: it must use clock.phase(...) at least once")
        times = {name: 0.0 for name, _, _ in self._edges}
        for name, start, end in self._edges:
            times[name] += (end - start) / 1e6
        times[TOTAL] = (self._edges[-1][2] - self._edges[0][1]) / 1e6
        self._edges = []
        return times


@dataclass(frozen=True)
class StepTimes:
    """Measured and warm-up times by phase, including `total`, in step order."""

    phases: dict[str, Measurement]
    warmup_ms: dict[str, list[float]]


@measuring()
def measure_steps(
    step: Callable[[PhaseClock], None],
    *,
    device: torch.device,
    warmup: int,
    steps: int,
    time_cap_s: float,
    max_steps: int | None = None,
    interval: float = 0.0,
) -> StepTimes:
    """Time warm-up and measured steps with the host clock, phase by phase.

    Measures at least `steps`, and up to `max_steps` until the median total is known to within
    `interval` (see `MedianRule`); without `max_steps`, exactly `steps`. The time cap covers warm-up
    and measured steps together. Once it has passed, the remaining warm-up is skipped but one sample
    is still taken, so there is always a number; `stopped` gives the reason.
    """
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    most = steps if max_steps is None else max_steps
    rule = MedianRule(steps=steps, max_steps=most, interval=interval, time_cap_s=time_cap_s)
    clock = PhaseClock(device)
    warm: list[dict[str, float]] = []
    measured: list[dict[str, float]] = []
    started = time.perf_counter()
    with collector_paused():
        while True:
            totals, elapsed_s = [times[TOTAL] for times in measured], time.perf_counter() - started
            if (stopped := rule.reason(totals, elapsed_s)) is not None:
                break
            late = elapsed_s >= time_cap_s
            warming = len(warm) < warmup and not (late and warm)
            step(clock)
            (warm if warming else measured).append(clock.take_step_ms())
    if len(warm) < warmup:
        stopped += f" and {len(warm)} of {warmup} warm-ups"
    return StepTimes(
        phases={
            name: Measurement(samples_ms=tuple(samples), clock="wall", stopped=stopped)
            for name, samples in _by_phase(measured, list(measured[0])).items()
        },
        warmup_ms=_by_phase(warm, list(measured[0])),
    )


def _by_phase(step_times: list[dict[str, float]], names: list[str]) -> dict[str, list[float]]:
    for times in step_times:
        if set(times) != set(names):
            raise ValueError(f"step: its phases changed from {names} to {list(times)}")
    return {name: [times[name] for times in step_times] for name in names}
