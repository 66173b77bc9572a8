"""From events to lifetimes: every piece of memory with its birth and death, and the highest moment.

Time is the position among the events. A piece that was there before the first event was born at -1;
it shows itself by being freed without having been allocated, or by being live at the end without
it. A piece that is never freed dies after the last event. Bytes at a position are those of all
pieces born at or before it and not dead yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lmlab.measure.memory.history import Event, Frames, History

BEFORE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One piece of memory from birth to death; live for positions born <= p < died."""

    address: int
    size: int
    """Bytes asked for."""
    block_bytes: int
    """Bytes that the allocator gave, as far as they are known; see `History`."""
    born: int
    died: int
    frames: Frames = ()
    operation: str = ""

    def is_live_at(self, position: int) -> bool:
        return self.born <= position < self.died


@dataclass(frozen=True, kw_only=True)
class Replay:
    """All pieces of a history, in the order of their birth."""

    pieces: Sequence[Piece]
    length: int
    """Number of events."""

    def live_at(self, position: int) -> list[Piece]:
        """Who is there after the event at this position."""
        return [piece for piece in self.pieces if piece.is_live_at(position)]

    def totals(self, size_of: Callable[[Piece], int]) -> list[int]:
        """Bytes in use before the first event, and after each: one number more than events."""
        return running_totals(self.pieces, self.length, size_of)

    def peak_position(self, start: int, end: int) -> int:
        """Where most is in use among the positions start .. end - 1; the first such."""
        totals = self.totals(lambda piece: piece.block_bytes)
        return max(range(start, end), key=lambda position: totals[position - BEFORE])


def running_totals(
    pieces: Iterable[Piece], length: int, size_of: Callable[[Piece], int]
) -> list[int]:
    """Bytes of some pieces before the first event and after each."""
    change = [0] * (length + 2)
    for piece in pieces:
        change[piece.born - BEFORE] += size_of(piece)
        change[piece.died - BEFORE] -= size_of(piece)
    return list(accumulate(change))[: length + 1]


def replay(history: History) -> Replay:
    """Lifetimes of everything that the history tells of."""
    length = len(history.events)
    blocks = {block.address: block for block in history.live_at_end}
    pieces = list(_pieces(history, blocks_bytes={a: b.block_bytes for a, b in blocks.items()}))
    seen = {piece.address for piece in pieces if piece.died == length}
    pieces += [
        Piece(
            address=block.address,
            size=block.size,
            block_bytes=block.block_bytes,
            born=BEFORE,
            died=length,
            frames=block.frames,
        )
        for block in blocks.values()
        if block.address not in seen
    ]
    return Replay(pieces=sorted(pieces, key=lambda piece: piece.born), length=length)


def _pieces(history: History, *, blocks_bytes: dict[int, int]) -> Iterator[Piece]:
    """Pieces that an event tells of."""
    born: dict[int, tuple[int, Event]] = {}
    for position, event in enumerate(history.events):
        if event.kind == "alloc":
            born[event.address] = position, event
        elif event.kind == "free":
            start, made = born.pop(event.address, (BEFORE, event))
            yield _piece(made, start, position, made.block_bytes or made.size)
    for address, (start, made) in born.items():
        block_bytes = blocks_bytes.get(address, made.block_bytes or made.size)
        yield _piece(made, start, len(history.events), block_bytes)


def _piece(made: Event, born: int, died: int, block_bytes: int) -> Piece:
    return Piece(
        address=made.address,
        size=made.size,
        block_bytes=block_bytes,
        born=born,
        died=died,
        frames=made.frames if born != BEFORE else (),
        operation=made.operation,
    )
