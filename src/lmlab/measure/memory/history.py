"""What an allocator did, whoever wrote it down: events in order, and what was live at the end.

A GPU's snapshot and a CPU's profiler tell the same story in different words. Both become a
`History`, and everything after that (replay, categories, pictures) knows only this.

Two sizes are kept of a piece of memory. `size` is what was asked for: events carry it, and a tensor
is recognised by it. The allocator hands out whole blocks: multiples of 512 bytes on a GPU, and up
to 1 MiB more where the rest of a segment is not worth splitting. `max_memory_allocated` counts
blocks, so a curve of sizes alone stays a few percent below it (2.5 % for weights of 6.5 MiB, three
of which fill a segment of 20 MiB). Blocks that are live at the end tell how large they really are;
`blocks` works it out for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind = Literal["alloc", "free", "oom"]
Frames: TypeAlias = Sequence[Mapping[str, Any]]
"""A call stack, innermost first; each frame has `filename`, `line` and `name`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that the allocator did."""

    kind: Kind
    address: int
    """0 where memory could not be had."""
    size: int
    """Bytes asked for."""
    block_bytes: int = 0
    """Bytes that the allocator gave; 0 where only those asked for are known."""
    time_us: float = 0.0
    frames: Frames = ()
    operation: str = ""
    """The operator that asked, where the source of the history knows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of memory that is in use."""

    address: int
    size: int
    """Bytes asked for."""
    block_bytes: int
    """Bytes that the allocator gave."""
    frames: Frames = ()


@dataclass(frozen=True, kw_only=True)
class History:
    """Events in the order in which they happened."""

    events: Sequence[Event]
    live_at_end: Sequence[Block]
    dropped: bool = False
    """True when the recorder's buffer was full and its oldest events are missing."""
