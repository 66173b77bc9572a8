"""What an allocator did: events in order, and what was live at the end.

A GPU's memory snapshot and a CPU's profiler contain the same information in different form. Both
become a `History`, and everything after (replay, categories, figures) uses only this.

An allocation has two sizes. `size` is what was requested: events carry it, and tensors are
recognized by it. The allocator hands out whole blocks: multiples of 512 bytes on a GPU, and up to
1 MiB more if the remainder of a segment is not worth splitting. `max_memory_allocated` counts
blocks, so a curve of sizes stays a few percent below it (2.5 % for weights of 6.5 MiB, three of
which fill a segment of 20 MiB). Blocks that are live at the end report their real size; `blocks`
computes it for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind = Literal["alloc", "free", "oom"]
Frames: TypeAlias = Sequence[Mapping[str, Any]]
"""A call stack, innermost first; each frame has `filename`, `line` and `name`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of memory that the allocator gave out."""

    address: int
    """0 for a failed allocation."""
    size: int
    """Requested bytes."""
    block_bytes: int = 0
    """Bytes that the allocator gave; 0 if only the requested size is known."""
    frames: Frames = ()
    operation: str = ""
    """The operator that made the allocation, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(Block):
    """One action of the allocator."""

    kind: Kind


@dataclass(frozen=True, kw_only=True)
class History:
    """Events in order of time."""

    events: Sequence[Event]
    live_at_end: Sequence[Block]
    dropped: bool = False
    """True if the recorder's buffer was full and its oldest events are missing."""
