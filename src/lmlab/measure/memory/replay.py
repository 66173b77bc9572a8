"""From events to lifetimes: every allocation with its birth and death, and the peak.

Time is the position among the events. An allocation that existed before the first event was born at
-1; it is known because it is freed without having been allocated, or is live at the end without it.
One that is never freed dies after the last event. The bytes at a position are those of all
allocations born at or before it and not yet dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lmlab.measure.memory.history import Block, Frames, History

BEFORE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Memory from birth to death; live at positions born <= p < died."""

    address: int
    size: int
    """Requested bytes."""
    block_bytes: int
    """Bytes that the allocator gave, as far as known; see `History`."""
    born: int
    died: int
    frames: Frames = ()
    operation: str = ""

    def is_live_at(self, position: int) -> bool:
        return self.born <= position < self.died


@dataclass(frozen=True, kw_only=True)
class Replay:
    """All allocations of a history, in order of birth."""

    allocations: Sequence[Allocation]
    length: int
    """Number of events."""

    def live_at(self, position: int) -> list[Allocation]:
        """What is live after the event at this position."""
        return [each for each in self.allocations if each.is_live_at(position)]

    def totals(self, size_of: Callable[[Allocation], int]) -> list[int]:
        """Bytes in use before the first event and after each: one more number than events."""
        return running_totals(self.allocations, self.length, size_of)

    def peak_position(self, start: int, end: int) -> int:
        """The first position in start .. end - 1 at which most bytes are in use."""
        totals = self.totals(lambda allocation: allocation.block_bytes)
        return max(range(start, end), key=lambda position: totals[position - BEFORE])


def running_totals(
    allocations: Iterable[Allocation], length: int, size_of: Callable[[Allocation], int]
) -> list[int]:
    """Bytes of these allocations before the first event and after each."""
    change = [0] * (length + 2)
    for each in allocations:
        change[each.born - BEFORE] += size_of(each)
        change[each.died - BEFORE] -= size_of(each)
    return list(accumulate(change))[: length + 1]


def replay(history: History) -> Replay:
    """Lifetimes of everything in the history."""
    length = len(history.events)
    live: dict[int, Allocation] = {}
    dead: list[Allocation] = []
    for position, event in enumerate(history.events):
        if event.kind == "alloc":
            live[event.address] = _allocation(event, born=position, died=length)
        elif event.kind == "free":
            older = _allocation(event, born=BEFORE, died=length, frames=())
            dead.append(replace(live.pop(event.address, older), died=position))
    for block in history.live_at_end:
        older = _allocation(block, born=BEFORE, died=length)
        made = live.get(block.address, older)
        live[block.address] = replace(made, block_bytes=older.block_bytes)
    allocations = sorted([*dead, *live.values()], key=lambda each: each.born)
    return Replay(allocations=allocations, length=length)


def _allocation(block: Block, *, born: int, died: int, frames: Frames | None = None) -> Allocation:
    return Allocation(
        address=block.address,
        size=block.size,
        block_bytes=block.block_bytes or block.size,
        born=born,
        died=died,
        frames=block.frames if frames is None else frames,
        operation=block.operation,
    )
