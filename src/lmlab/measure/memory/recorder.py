"""One step recorded, phase by phase, on a GPU or on a CPU.

What happened when is told by marks: before each phase, and after the last, a few bytes are
allocated and kept, and the event that gave them is a position in the history. Nothing depends on
clocks, and nothing is dropped between two versions of torch. At every mark the caller also says
which addresses he knows (weights, gradients, optimizer state): an address means something only as
long as its memory is live.

On a GPU the caching allocator keeps the history itself, with Python's call stack for each
allocation (two microseconds each) in a buffer of bounded length. On a CPU the profiler does.
Neither is for timing: recording is off whenever a clock runs.

Running out of memory ends a recording, not the point: the history then ends with what was asked
for and could not be had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lmlab.measure.device import is_out_of_memory
from lmlab.measure.memory import cpu_events, snapshot
from lmlab.measure.memory.history import Block, Event, History
from lmlab.measure.memory.observer import Observer
from lmlab.measure.memory.replay import BEFORE

# Some 15,000 events are a train step of 48 layers.
MAX_ENTRIES = 400_000
MARK_BYTES = 1

Run: TypeAlias = Callable[[], None]


class RecordingError(RuntimeError):
    """A history that does not hold what was recorded, in one line."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A tensor that somebody outside the step can name."""

    category: str
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """A phase among the events: after position `start`, up to and with `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A step's history, cut into phases."""

    history: History
    phases: Sequence[Span]
    known: Sequence[tuple[int, Mapping[int, Known]]]
    """Positions, and what lies at which address there."""
    observer: Observer
    marks: frozenset[int]
    """Positions of the events that only mark."""
    out_of_memory: str | None = None
    """The error's own words where memory ran out."""
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False)
    """torch's own snapshot, for its viewer; None on a CPU."""


@dataclass(kw_only=True)
class _Notes:
    """What a recording gathers while it runs."""

    names: list[str] = field(default_factory=list)
    marks: list[Tensor] = field(default_factory=list)
    known: list[Mapping[int, Known]] = field(default_factory=list)
    out_of_memory: str | None = None


def record(
    phases: Sequence[tuple[str, Run]],
    *,
    device: torch.device,
    identify: Callable[[], Mapping[int, Known]],
    observer: Observer,
    observed: frozenset[str] = frozenset({"forward"}),
) -> Recording:
    """Run the phases once and return what memory did; running out of it is an answer too."""
    notes = _Notes()
    with _history_kept(device) as keeper:
        try:
            for name, run in phases:
                _mark(notes, name, device, identify)
                with observer if name in observed else nullcontext():
                    run()
            _mark(notes, "", device, identify)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            notes.out_of_memory = str(error)
            notes.known.append(identify())
            keeper.freeze()  # here the error's traceback still holds what was live
        keeper.freeze()
    return _recording(notes, keeper, observer)


def _mark(notes: _Notes, name: str, device: torch.device, identify: Callable[[], Any]) -> None:
    notes.known.append(identify())
    notes.marks.append(torch.empty(MARK_BYTES, dtype=torch.uint8, device=device))
    if name:
        notes.names.append(name)


class _CudaKeeper:
    """The caching allocator's own book."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self.snapshot: Mapping[str, Any] | None = None

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
        )

    def freeze(self) -> None:
        if self.snapshot is None:
            self.snapshot = torch.cuda.memory._snapshot()

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(None)

    def history(self, known: Mapping[int, Known]) -> History:
        assert self.snapshot is not None, "a history is read after it was frozen"
        return snapshot.history_of(self.snapshot, self._index, max_entries=MAX_ENTRIES)


class _CpuKeeper:
    """The profiler's memory events."""

    snapshot: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def start(self) -> None:
        self._profile.start()

    def freeze(self) -> None:
        """Its events are kept until it is asked."""

    def stop(self) -> None:
        self._profile.stop()

    def history(self, known: Mapping[int, Known]) -> History:
        """Of what lasted, only what somebody can name is known to be there."""
        blocks = [
            Block(address=address, size=tensor.size, block_bytes=tensor.size)
            for address, tensor in known.items()
        ]
        return cpu_events.history_of(self._profile, blocks)


@contextmanager
def _history_kept(device: torch.device) -> Iterator[_CudaKeeper | _CpuKeeper]:
    keeper = _CudaKeeper(device) if device.type == "cuda" else _CpuKeeper()
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()


def _recording(notes: _Notes, keeper: _CudaKeeper | _CpuKeeper, observer: Observer) -> Recording:
    history = keeper.history(notes.known[-1])
    events = history.events
    positions = [_position_of(mark, events) for mark in notes.marks]
    last = len(events) - 1
    ends = [*positions[1:], *([_failure(events)] if notes.out_of_memory else [])]
    known_at = [*positions, *([last] if notes.out_of_memory else [])]
    spans = [
        Span(name=name, start=start, end=end)
        for name, start, end in zip(notes.names, positions[: len(ends)], ends, strict=True)
    ]
    return Recording(
        history=history,
        phases=spans,
        known=list(zip(known_at, notes.known, strict=True)),
        observer=observer,
        marks=frozenset(positions),
        out_of_memory=notes.out_of_memory,
        snapshot=keeper.snapshot,
    )


def _position_of(mark: Tensor, events: Sequence[Event]) -> int:
    """The event that gave a mark its memory: the last at its address, since it still lives."""
    address = mark.untyped_storage().data_ptr()
    for position in range(len(events) - 1, BEFORE, -1):
        if events[position].kind == "alloc" and events[position].address == address:
            return position
    raise RecordingError("the history lost one of its marks: it holds fewer events than happened")


def _failure(events: Sequence[Event]) -> int:
    """Where memory ran out; a failure outside the allocator shows only as the end."""
    failures = [position for position, event in enumerate(events) if event.kind == "oom"]
    return failures[-1] if failures else len(events) - 1
