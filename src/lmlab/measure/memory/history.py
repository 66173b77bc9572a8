"""Allocator events in order, and their replay into allocations with lifetimes.

A GPU's memory snapshot and a CPU's profiler both become a `History`; all later stages use only
this. An allocation has two sizes: `size` is what was requested and identifies tensors;
`block_bytes` is what the allocator gave, as counted by `max_memory_allocated`: a multiple of 512
bytes on a GPU, and up to 1 MiB more if the rest of a segment is not worth splitting off (2.5 % for
weights of 6.5 MiB, three of which fill a segment of 20 MiB).

Time is the number of events so far: position 0 is before the first event, position n after the nth.
An allocation from before the first event is born at 0; it shows up as a free without an allocation,
or as live at the end without one. One that is never freed dies after the last position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

Kind = Literal["alloc", "free", "oom"]
Frames = Sequence[Mapping[str, Any]]
"""A call stack, innermost first; each frame has `filename`, `line` and `name`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of memory that the allocator gave out."""

    address: int  # 0 for a failed allocation
    size: int  # requested bytes
    block_bytes: int = 0  # bytes that the allocator gave; 0 if only the requested size is known
    frames: Frames = ()
    operation: str = ""  # the operator that made the allocation, if known


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


def replay(history: History) -> pd.DataFrame:
    """One row per allocation in order of birth: address, size, block_bytes, frames, operation, and
    its lifetime, the positions born <= p < died."""
    never = len(history.events) + 1
    live: dict[int, dict[str, Any]] = {}
    dead = []
    for position, event in enumerate(history.events, start=1):
        if event.kind == "alloc":
            live[event.address] = _allocation(event, position, never)
        elif event.kind == "free":
            older = {**_allocation(event, 0, never), "frames": ()}
            dead.append({**live.pop(event.address, older), "died": position})
    for block in history.live_at_end:
        older = _allocation(block, 0, never)
        live.setdefault(block.address, older)["block_bytes"] = older["block_bytes"]
    columns = ["address", "size", "block_bytes", "frames", "operation", "born", "died"]
    rows = pd.DataFrame([*dead, *live.values()], columns=columns)
    rows = rows.astype(dict.fromkeys(("size", "block_bytes", "born", "died"), "int64"))
    return rows.sort_values("born", kind="stable", ignore_index=True)


def _allocation(block: Block, born: int, died: int) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "block_bytes": block.block_bytes or block.size,
        "frames": block.frames,
        "operation": block.operation,
        "born": born,
        "died": died,
    }


def live_at(allocations: pd.DataFrame, position: int) -> pd.DataFrame:
    """The allocations that are live at this position."""
    return allocations[(allocations["born"] <= position) & (position < allocations["died"])]


def active_bytes(
    allocations: pd.DataFrame, events: int, of: str = "block_bytes"
) -> npt.NDArray[np.int64]:
    """Live bytes of these allocations at each position of a history with `events` events."""
    change = np.zeros(events + 2, dtype=np.int64)
    np.add.at(change, allocations["born"].to_numpy(), allocations[of].to_numpy())
    np.subtract.at(change, allocations["died"].to_numpy(), allocations[of].to_numpy())
    return change.cumsum()[:-1]
