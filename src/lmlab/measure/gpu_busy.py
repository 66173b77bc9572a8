"""How much of the time a GPU works: the union of all kernel, copy and set intervals of one run.

Small models leave a GPU waiting for the host, and then forward and backward take about the same
because both take as long as Python needs to launch them. Whether that is so is not to be guessed
from times; it shows in the share of a phase during which anything at all ran on the GPU. Kernels
on several streams overlap, so their durations must not be added: the union of their intervals is
the busy time.

This is a share's numerator and never a timing: the profiler slows the host down, so it stretches
the gaps between kernels and not the kernels. Divide by the phase's time from the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def union_ms(intervals: Iterable[tuple[int, int]]) -> float:
    """Milliseconds covered by at least one of the `(start_ns, end_ns)` intervals."""
    covered_ns = 0
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            reached = start
        if end > reached:
            covered_ns += end - reached
            reached = end
    return covered_ns / 1e6


def busy_ms(fn: Callable[[], object], device: torch.device) -> float | None:
    """Run `fn` once under the profiler: milliseconds in which its GPU did work; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize(device)
    inner = profiler.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("the PyTorch profiler recorded nothing: this build has no Kineto")
    return union_ms(work_intervals(inner.kineto_results.events(), device.index or 0))


def work_intervals(events: Iterable[Any], device_index: int) -> list[tuple[int, int]]:
    """Intervals of kernels, copies and sets on one GPU among the profiler's events.

    The profiler also projects `record_function` ranges onto the GPU's timeline; those span idle
    time and would make every phase look fully busy.
    """
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
        and event.device_index() == device_index
        and not event.is_user_annotation()
    ]
