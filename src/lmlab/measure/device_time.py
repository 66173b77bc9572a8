"""Device time, the second clock of a step: how long the GPU was busy with each of its phases.

Small models leave a GPU waiting for the host; forward and backward then take about the same time,
because both take as long as Python needs to launch them. Wall time then says more about the host
than about the model. The device time of a phase is the union of its kernel, copy and memset
intervals; it repeats from machine to machine, and its ratio to wall time shows who waits for whom.

Several steps are run under one profiler. The device is idle at every edge of a phase, so each
interval belongs to the phase in which it starts, by the host's clock, which the profiler's
timestamps follow. A CPU has no device time: nothing is recorded there.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity

from lmlab.measure.clock import TOTAL, synchronize
from lmlab.measure.gpu_busy import interval, is_gpu_work, profiled_events
from lmlab.measure.intervals import Interval, length
from lmlab.measure.statistics import Measurement

PROFILED_STEPS = 5

Phases = Sequence[tuple[str, Callable[[], object]]]
Work = dict[str, list[list[Interval]]]
"""Intervals in which the GPU worked, in nanoseconds: by phase, one list per step."""


def device_times(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> dict[str, Measurement]:
    """Busy time of every phase and of the whole step; empty on a CPU."""
    return busy_times(profiled_work(phases, device, prepare=prepare))


def profiled_work(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> Work:
    """Run some steps under the profiler; `prepare` runs before each and belongs to no phase."""
    if device.type != "cuda":
        return {}
    edges: list[tuple[str, int, int]] = []

    def run_steps() -> None:
        for _ in range(PROFILED_STEPS):
            prepare()
            synchronize(device)
            for name, run in phases:
                started_ns = time.time_ns()
                run()
                synchronize(device)
                edges.append((name, started_ns, time.time_ns()))

    events = profiled_events(run_steps, device, [ProfilerActivity.CUDA])
    return by_phase(edges, [interval(event) for event in events if is_gpu_work(event, device)])


def by_phase(edges: Sequence[tuple[str, int, int]], intervals: Sequence[Interval]) -> Work:
    """The intervals that start within each phase."""
    ordered = sorted(intervals)
    work: Work = {}
    for name, *phase in edges:
        start, end = (bisect_left(ordered, (moment,)) for moment in phase)
        work.setdefault(name, []).append(ordered[start:end])
    return work


def busy_times(work: Mapping[str, Sequence[Sequence[Interval]]]) -> dict[str, Measurement]:
    """Statistics over the steps, by phase; the total is their sum, since phases do not overlap."""
    busy = {name: [length(step) / 1e6 for step in steps] for name, steps in work.items()}
    if busy:
        busy[TOTAL] = [sum(step) for step in zip(*busy.values(), strict=True)]
    return {
        name: Measurement(
            samples_ms=tuple(samples),
            clock="device",
            cache="warm",
            stopped=f"{len(samples)} profiled steps",
        )
        for name, samples in busy.items()
    }
