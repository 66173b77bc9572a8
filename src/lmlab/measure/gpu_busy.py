"""GPU busy time, the union of all kernel, copy and memset intervals of one profiled run.

Small models leave a GPU waiting for the host; forward and backward then take about the same time,
because both take as long as Python needs to launch them. The busy time of a phase, divided by its
wall time, shows whether that is so. Kernels on several streams overlap, so their durations must not
be added. The profiler slows the host down and stretches the gaps between kernels, but not the
kernels: take shares and intervals from here, never a step's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lmlab.measure.clock import synchronize
from lmlab.measure.intervals import Interval, length


def busy_ms(fn: Callable[[], object], device: torch.device) -> float | None:
    """Run `fn` once under the profiler: milliseconds in which its GPU was busy; None on a CPU."""
    if device.type != "cuda":
        return None
    events = profiled_events(fn, device, [ProfilerActivity.CUDA])
    return length(interval(event) for event in events if is_gpu_work(event, device)) / 1e6


def profiled_events(
    fn: Callable[[], object], device: torch.device, activities: list[ProfilerActivity]
) -> list[Any]:
    """Run `fn` once under the profiler; its raw events."""
    synchronize(device)
    with profile(activities=activities) as profiler:
        fn()
        synchronize(device)
    inner = profiler.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("the PyTorch profiler recorded nothing: this build has no Kineto")
    return list(inner.kineto_results.events())


def interval(event: Any) -> Interval:
    """Start and end in nanoseconds."""
    return (event.start_ns(), event.start_ns() + event.duration_ns())


def is_gpu_work(event: Any, device: torch.device) -> bool:
    """Whether it is a kernel, copy or memset on this GPU.

    The profiler also draws `record_function` ranges on the GPU's timeline; those span idle time.
    """
    return bool(
        device.type == "cuda"
        and event.device_type() == DeviceType.CUDA
        and event.device_index() == (device.index or 0)
        and not event.is_user_annotation()
    )
