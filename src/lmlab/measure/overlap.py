"""Compute and communication in a profile of one step, and how much they overlap.

Communication looks different per backend. An NCCL message is a kernel on its own stream. Gloo runs
on host threads; the profiler records each message from submission to completion under a name that
starts with `gloo:`. If gloo sends GPU tensors, the copies to the host and back are part of a
message and also get their own row. A message queued behind another counts as in flight.

Compute is everything on the GPU that is neither message nor copy; on a CPU it is the operators,
except those on gloo's own threads (the division of an average). Named ranges are not work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lmlab.measure.intervals import (
    interval,
    is_gpu_work,
    length,
    profiled_events,
    reduced,
    union,
)

MAX_INTERVALS = 120  # per row of a figure; more would not be visible


def profile_overlap(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run a step once under the profiler; see `overlap_from_events`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return overlap_from_events(profiled_events(step, device, activities), device)


def overlap_from_events(events: Sequence[Any], device: torch.device) -> dict[str, Any]:
    """One rank's activity: totals over the whole trace, and intervals reduced for a figure.

    `overlapped_ms` is the time with a message in flight and compute running; `overlapped_share` is
    its share of the time with any message in flight, None without messages.
    """
    on_host = (event for event in events if event.device_type() == DeviceType.CPU)
    gloo = [event for event in on_host if str(event.name()).startswith("gloo:")]
    on_gpu = [event for event in events if is_gpu_work(event, device)]
    nccl = [event for event in on_gpu if "nccl" in event.name().lower()]
    copies = [event for event in on_gpu if event.name().startswith(("Memcpy", "Memset"))]
    if device.type == "cuda":
        not_compute = {id(event) for event in [*nccl, *copies]}
        compute = [event for event in on_gpu if id(event) not in not_compute]
    else:
        threads = {event.start_thread_id() for event in gloo}
        operators = (event for event in events if str(event.name()).startswith("aten::"))
        compute = [event for event in operators if event.start_thread_id() not in threads]
    rows = {
        "compute": union(map(interval, compute)),
        "communication": [interval(event) for event in [*gloo, *nccl]],
        "copies": union(map(interval, copies)),
    }
    in_flight = length(rows["communication"])
    either = length([*rows["compute"], *rows["communication"]])
    overlapped = length(rows["compute"]) + in_flight - either
    origin = min((start for row in rows.values() for start, _ in row), default=0)
    return {
        **{f"{name}_ms": length(row) / 1e6 for name, row in rows.items()},
        "overlapped_ms": overlapped / 1e6,
        "overlapped_share": overlapped / in_flight if in_flight else None,
        "messages_seen": len(rows["communication"]),
        "seen_as": "NCCL kernels" if nccl else "gloo's messages" if gloo else None,
        "intervals_ms": {
            name: [
                [round((edge - origin) / 1e6, 3) for edge in stretch]
                for stretch in reduced(row, MAX_INTERVALS)
            ]
            for name, row in rows.items()
        },
    }
