"""Device time of whole steps, measured after their wall time.

A profiler stays attached to the process after its first session and makes every launch cost the
host more. So profile last: wall times taken afterwards are invalid.
"""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

from lmlab.measure.clock import TOTAL, synchronize
from lmlab.measure.device_time import busy_times, by_phase
from lmlab.measure.intervals import interval, is_gpu_work, profiled_events
from lmlab.measure.statistics import Measurement

PROFILED_STEPS = 3


def device_time(run: Callable[[], object], device: torch.device) -> Measurement | None:
    """GPU busy time of `PROFILED_STEPS` steps; None on a CPU, or if any step recorded no work. A
    one-step session comes first, because the first session may lose kernels."""
    if device.type != "cuda":
        return None
    edges: list[tuple[str, int, int]] = []

    def run_steps() -> None:
        for _ in range(PROFILED_STEPS):
            synchronize(device)
            started_ns = time.time_ns()
            run()
            synchronize(device)
            edges.append((TOTAL, started_ns, time.time_ns()))

    profiled_events(run, device, [ProfilerActivity.CUDA])
    events = profiled_events(run_steps, device, [ProfilerActivity.CUDA])
    work = by_phase(edges, [interval(event) for event in events if is_gpu_work(event, device)])
    return busy_times(work)[TOTAL] if all(work[TOTAL]) else None
