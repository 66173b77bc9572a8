"""Device time of a whole step that is timed otherwise: one profiled call at a time.

`device_time` profiles several steps by phase; here a step is expensive, or has only one phase.
"""

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity

from lmlab.measure.intervals import interval, is_gpu_work, length, profiled_events
from lmlab.measure.statistics import Measurement


def busy_ms(run: Callable[[], object], device: torch.device) -> list[float]:
    """Run it once; for how long the GPU was busy with it, or nothing on a CPU."""
    if device.type != "cuda":
        run()
        return []
    events = profiled_events(run, device, [ProfilerActivity.CUDA])
    return [length(interval(event) for event in events if is_gpu_work(event, device)) / 1e6]


def device_measurement(samples_ms: Sequence[float]) -> Measurement:
    """Profiled steps as a measurement."""
    stopped = f"{len(samples_ms)} profiled steps"
    return Measurement(samples_ms=tuple(samples_ms), clock="device", stopped=stopped)
