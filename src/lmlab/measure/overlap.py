"""Computation and communication of one step, as the profiler saw them, and where they overlap.

Communication shows up differently by backend. NCCL's is a kernel among kernels, on a stream of its
own. Gloo's runs on threads of the host; the profiler records each message from the moment it is
handed over to the moment its result is there, under a name that starts with `gloo:`. Where a GPU's
tensors travel by gloo, copies to the host and back are part of a message and drawn in a row of
their own. A message that waits behind another counts as under way: that is what the sender sees.

Computation is what ran on the GPU and was neither message nor copy; on a CPU the operators, except
those that gloo's own threads ran (it divides there). Ranges that programs name are not work.

The profiler slows the host down. Shares and pictures come from here, times from the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as session

from lmlab.measure.clock import synchronize
from lmlab.measure.intervals import Interval, intersection, length, reduced, union

MOST_INTERVALS = 120
"""A picture of a page's width shows no more."""

_GLOO = "gloo:"
_NCCL = "nccl"
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What one rank did in one step; nanoseconds on the profiler's clock."""

    compute: Sequence[Interval]
    communication: Sequence[Interval]
    copies: Sequence[Interval]
    seen_as: str | None
    """How messages show in the trace; None if it has none."""

    @property
    def overlapped_ns(self) -> int:
        """Time in which a message was under way and something was computed."""
        return length(intersection(self.compute, self.communication))

    @property
    def overlapped_share(self) -> float | None:
        """Of the time in which messages were under way; None without any."""
        total = length(self.communication)
        return self.overlapped_ns / total if total else None

    def to_json(self) -> dict[str, Any]:
        """Sums of the whole trace, and few enough intervals for a picture."""
        rows = {
            "compute": self.compute,
            "communication": self.communication,
            "copies": self.copies,
        }
        origin = min((start for row in rows.values() for start, _ in row), default=0)
        return {
            "compute_ms": length(self.compute) / 1e6,
            "communication_ms": length(self.communication) / 1e6,
            "copies_ms": length(self.copies) / 1e6,
            "overlapped_ms": self.overlapped_ns / 1e6,
            "overlapped_share": self.overlapped_share,
            "messages_seen": len(self.communication),
            "seen_as": self.seen_as,
            "intervals_ms": {name: _for_a_picture(row, origin) for name, row in rows.items()},
        }


def _for_a_picture(row: Iterable[Interval], origin: int) -> list[list[float]]:
    return [
        [round((start - origin) / 1e6, 3), round((end - origin) / 1e6, 3)]
        for start, end in reduced(row, MOST_INTERVALS)
    ]


def profile_overlap(step: Callable[[], object], device: torch.device) -> Overlap:
    """Run a step once under the profiler."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with session(activities=activities) as profiler:
        step()
        synchronize(device)
    inner = profiler.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("the PyTorch profiler recorded nothing: this build has no Kineto")
    return overlap_of(inner.kineto_results.events(), device)


def start_profiler(device: torch.device) -> None:
    """An empty session: the first one on a GPU takes seconds and loses kernels."""
    profile_overlap(lambda: None, device)


def overlap_of(events: Iterable[Any], device: torch.device) -> Overlap:
    """Sort a profiler's events into rows."""
    everything = list(events)
    gloo = [event for event in everything if _is_gloo(event)]
    on_gpu = [event for event in everything if _ran_on_gpu(event, device)]
    nccl = [event for event in on_gpu if _NCCL in event.name().lower()]
    copies = [event for event in on_gpu if event.name().startswith(_COPIES)]
    if device.type == "cuda":
        apart = {id(event) for event in [*nccl, *copies]}
        compute = [event for event in on_gpu if id(event) not in apart]
    else:
        threads = {event.start_thread_id() for event in gloo}
        compute = [event for event in everything if _is_operator(event, threads)]
    return Overlap(
        compute=union(map(_interval, compute)),
        communication=[_interval(event) for event in [*gloo, *nccl]],
        copies=union(map(_interval, copies)),
        seen_as="NCCL kernels" if nccl else "gloo's messages" if gloo else None,
    )


def _interval(event: Any) -> Interval:
    return (event.start_ns(), event.start_ns() + event.duration_ns())


def _is_gloo(event: Any) -> bool:
    return event.device_type() == DeviceType.CPU and str(event.name()).startswith(_GLOO)


def _ran_on_gpu(event: Any, device: torch.device) -> bool:
    """The profiler also draws ranges over the kernels in them; those are no work."""
    return (
        device.type == "cuda"
        and event.device_type() == DeviceType.CUDA
        and event.device_index() == (device.index or 0)
        and not event.is_user_annotation()
    )


def _is_operator(event: Any, threads_of_gloo: set[int]) -> bool:
    return str(event.name()).startswith("aten::") and (
        event.start_thread_id() not in threads_of_gloo
    )
