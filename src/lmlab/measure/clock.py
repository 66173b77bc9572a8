"""The two clocks: the host's for steps of a model, the GPU's own for single kernels.

**Steps** are timed by the host. A GPU works asynchronously, so each edge of a phase first waits
for the device and then reads `perf_counter_ns`: the time between two edges is what a user waits
for, launch gaps included. Warm-up and measured steps go through one and the same loop; with no
warm-up the first sample really is the cold step, with its kernel loading, allocator growth and
autotuning.

**Kernels** can be shorter than the time it takes to launch them, so they are timed by the GPU's
clock, with a flushed cache (`cuda_events`), repeated until the time has settled (`stop_rule`). On a
CPU the host clock is used and nothing is flushed: such samples have `cache: warm`.

Python's garbage collector is emptied, frozen and switched off while a clock runs: a collection in
the middle of a step costs milliseconds and comes at a moment that depends on unrelated objects.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lmlab.measure.cuda_events import EventSampler
from lmlab.measure.statistics import Cache, Measurement
from lmlab.measure.stop_rule import MedianRule, StopRule

TOTAL = "total"

_KERNEL_WARMUP_CALLS = 3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued; a CPU is never behind."""
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
    """Times the named phases of one step after another; the device is idle at every edge."""

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
        """Phases of the step just done, and their total from first to last edge; then resets."""
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
    """Measured steps by phase, `total` among them, and the warm-up steps before, in order."""

    phases: dict[str, Measurement]
    warmup_ms: dict[str, list[float]]


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
    """Time warm-up and measured steps by the host clock, phase by phase.

    At least `steps` are measured, and up to `max_steps` until the median of the total is known
    within `interval` (see `MedianRule`); without `max_steps` exactly `steps`. The time cap covers
    warm-up and measured steps together. Once it has passed, the rest of the warm-up is skipped and
    one sample is still taken, so there is always a number; `stopped` gives the reason.
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
        while (stopped := rule.reason(_totals(measured), time.perf_counter() - started)) is None:
            late = time.perf_counter() - started >= time_cap_s
            warming = len(warm) < warmup and not (late and warm)
            step(clock)
            (warm if warming else measured).append(clock.take_step_ms())
    if len(warm) < warmup:
        stopped += f" and {len(warm)} of {warmup} warm-ups"
    return StepTimes(
        phases={
            name: Measurement(
                samples_ms=tuple(samples), clock="wall", cache="warm", stopped=stopped
            )
            for name, samples in _by_phase(measured, list(measured[0])).items()
        },
        warmup_ms=_by_phase(warm, list(measured[0])),
    )


def _totals(step_times: list[dict[str, float]]) -> list[float]:
    return [times[TOTAL] for times in step_times]


def _by_phase(step_times: list[dict[str, float]], names: list[str]) -> dict[str, list[float]]:
    for times in step_times:
        if set(times) != set(names):
            raise ValueError(f"step: its phases changed from {names} to {list(times)}")
    return {name: [times[name] for times in step_times] for name in names}


def measure_kernel(
    fn: Callable[[], object],
    *,
    device: torch.device,
    min_samples: int = 10,
    min_time_s: float = 0.1,
    target_relative_deviation: float = 0.005,
    time_cap_s: float = 5.0,
    flush_cache: bool = True,
    max_samples: int = 10_000,
) -> Measurement:
    """Repeat `fn` until its time has settled (see StopRule) and return every sample.

    The cap covers warm-up and sampling; one warm-up call and one sample are always taken.
    """
    rule = StopRule(
        min_samples=min_samples,
        min_time_s=min_time_s,
        target_relative_deviation=target_relative_deviation,
        time_cap_s=time_cap_s,
        max_samples=max_samples,
    )
    on_gpu = device.type == "cuda"
    cache: Cache = "cold" if on_gpu and flush_cache else "warm"
    samples: list[float] = []
    with collector_paused():
        started = time.perf_counter()
        call_s = _warm_up(fn, device, time_cap_s)
        take = EventSampler(fn, device, flush_cache) if on_gpu else _host_sampler(fn)
        # Small batches, so that the rule is checked at least every `min_time_s`.
        batch = max(1, min(min_samples, int(min_time_s / max(call_s, 1e-9))))
        while (stopped := rule.reason(time.perf_counter() - started)) is None:
            for sample in take(min(batch, max_samples - rule.n)):
                samples.append(sample)
                rule.add(sample)
    return Measurement(
        samples_ms=tuple(samples),
        clock="events" if on_gpu else "wall",
        cache=cache,
        stopped=stopped,
    )


def _warm_up(fn: Callable[[], object], device: torch.device, time_cap_s: float) -> float:
    """Call `fn` a few times, once if it is slow; returns the seconds that the last call took."""
    started = time.perf_counter()
    call_s = 0.0
    for _ in range(_KERNEL_WARMUP_CALLS):
        before = time.perf_counter()
        fn()
        synchronize(device)
        call_s = time.perf_counter() - before
        if time.perf_counter() - started > time_cap_s / 4:
            break
    return call_s


def _host_sampler(fn: Callable[[], object]) -> Callable[[int], list[float]]:
    def take(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter_ns()
            fn()
            samples.append((time.perf_counter_ns() - start) / 1e6)
        return samples

    return take
