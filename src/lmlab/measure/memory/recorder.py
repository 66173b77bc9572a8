"""Records one step, phase by phase, on a GPU or on a CPU.

Phases are delimited by marks: before each phase, and after the last, one byte is allocated and
kept, and the event of that allocation is a position in the history. This needs no clock and no
annotations that some version of torch might not record. At every mark the caller also names the
addresses it knows (weights, gradients, optimizer state), because an address is meaningful only
while its memory is live.

On a GPU the caching allocator records the history itself, with Python's call stack for each
allocation (two microseconds each), in a buffer of limited length. On a CPU the profiler does.
Neither is for timing: never record while a clock runs.

Running out of memory ends the recording but is not an error: the history then ends with the
request that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmlab.measure.device import is_out_of_memory
from lmlab.measure.memory import cpu_events, snapshot
from lmlab.measure.memory.history import Block, Event, History
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.memory.replay import BEFORE

# A train step of 48 layers has about 15,000 events.
MAX_ENTRIES = 400_000

Run = Callable[[], None]


class RecordingError(RuntimeError):
    """A history that does not contain what was recorded."""


@dataclass(frozen=True, kw_only=True)
class KnownTensor:
    """A tensor that the caller can name."""

    category: str
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """A phase among the events: after position `start`, up to and including `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A step's history, divided into phases."""

    history: History
    phases: Sequence[Span]
    known: Sequence[tuple[int, Mapping[int, KnownTensor]]]
    """Positions, and the known tensors by address there."""
    observer: Observer
    marks: frozenset[int]
    """Positions of the marks."""
    out_of_memory: str | None = None
    """The error message if memory ran out."""
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False)
    """torch's own snapshot, for its viewer; None on a CPU."""


def record(
    phases: Sequence[tuple[str, Run]],
    *,
    device: torch.device,
    identify: Callable[[], Mapping[int, KnownTensor]],
    observer: Observer,
    observed: frozenset[str] = frozenset({"forward"}),
) -> Recording:
    """Run the phases once and return what memory did, also if it ran out."""
    marks: list[Tensor] = []
    known: list[Mapping[int, KnownTensor]] = []
    out_of_memory = None

    def mark() -> None:
        marks.append(torch.empty(1, dtype=torch.uint8, device=device))
        known.append(identify())

    source = _CachingAllocator(device) if device.type == "cuda" else _Profiler()
    source.start()
    try:
        for name, run in phases:
            mark()
            with observer if name in observed else nullcontext():
                run()
        mark()
        source.freeze()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = str(error)
        known.append(identify())
        source.freeze()  # now, while the error's traceback still holds what was live
    finally:
        source.stop()
    history = source.history(known[-1])
    positions = [_position_of(each, history.events) for each in marks]
    last = len(history.events) - 1
    ends = [*positions[1:], *([] if out_of_memory is None else [_failure(history.events)])]
    return Recording(
        history=history,
        phases=[
            Span(name=name, start=start, end=end)
            for (name, _), start, end in zip(phases, positions, ends, strict=False)
        ],
        known=list(zip([*positions, last], known, strict=False)),
        observer=observer,
        marks=frozenset(positions),
        out_of_memory=out_of_memory,
        snapshot=source.snapshot,
    )


class _CachingAllocator:
    """The history that the CUDA caching allocator keeps."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self.snapshot: Mapping[str, Any] | None = None

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
        )

    def freeze(self) -> None:
        self.snapshot = torch.cuda.memory._snapshot()

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(None)

    def history(self, known: Mapping[int, KnownTensor]) -> History:
        assert self.snapshot is not None, "a history is read after freeze()"
        return snapshot.history_of(self.snapshot, self._index, max_entries=MAX_ENTRIES)


class _Profiler:
    """The profiler's memory events."""

    snapshot: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)

    def start(self) -> None:
        self._profile.start()

    def freeze(self) -> None:
        """Its events are kept until they are read."""

    def stop(self) -> None:
        self._profile.stop()

    def history(self, known: Mapping[int, KnownTensor]) -> History:
        """Of memory that is live at the end, only the known tensors can be listed."""
        blocks = [
            Block(address=address, size=tensor.size, block_bytes=tensor.size)
            for address, tensor in known.items()
        ]
        return cpu_events.history_of(self._profile, blocks)


def _position_of(mark: Tensor, events: Sequence[Event]) -> int:
    """The event that allocated a mark: the last at its address, since it is still live."""
    address = address_of(mark)
    for position in range(len(events) - 1, BEFORE, -1):
        if events[position].kind == "alloc" and events[position].address == address:
            return position
    raise RecordingError("the history lacks one of its marks: the buffer was too short")


def _failure(events: Sequence[Event]) -> int:
    """Where memory ran out; a failure outside the allocator shows only as the end."""
    failures = [position for position, event in enumerate(events) if event.kind == "oom"]
    return failures[-1] if failures else len(events) - 1
