"""Events of one profiled run: which of them are work of a GPU, and when it was busy.

Kernels on several streams overlap, so their durations must not be added: the device was busy in the
union of their intervals. The profiler slows the host down and stretches the gaps between kernels,
but not the kernels: take shares and intervals from here, never a step's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lmlab.measure.clock import synchronize
from lmlab.measure.intervals import Interval


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
