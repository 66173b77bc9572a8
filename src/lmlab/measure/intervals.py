"""Time intervals as (start, end) pairs, and the busy intervals of a profiled GPU.

Intervals of one set may touch, nest and repeat (operators call operators, messages are in flight
concurrently), so never add up durations: the covered time is the length of the union.

The profiler slows the host down and stretches the gaps between kernels, but not the kernels: take
shares and intervals from a profiled run, never a step's time.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lmlab.measure.clock import synchronize
from lmlab.measure.time_spent import measuring

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same time; empty ones are dropped."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    """Time covered by at least one interval."""
    return sum(end - start for start, end in union(intervals))


def reduced(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """At most `most` intervals, for drawing and not for sums.

    The shortest gap or interval is removed first: a gap is closed, an interval is dropped. A dense
    row stays dense, and many short intervals far apart do not merge into long ones.
    """
    edges = np.array([edge for pair in union(intervals) for edge in pair], dtype=np.int64)
    while len(edges) > 2 * most:
        shortest = int(np.diff(edges).argmin())
        edges = np.delete(edges, [shortest, shortest + 1])
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@measuring()
def profiled_events(
    fn: Callable[[], object], device: torch.device, activities: list[ProfilerActivity]
) -> list[Any]:
    """Run `fn` once under the profiler and return the raw events."""
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
    """Whether the event is a kernel, copy or memset on this GPU.

    The profiler also draws `record_function` ranges on the GPU's timeline; those span idle time.
    """
    return bool(
        device.type == "cuda"
        and event.device_type() == DeviceType.CUDA
        and event.device_index() == (device.index or 0)
        and not event.is_user_annotation()
    )
