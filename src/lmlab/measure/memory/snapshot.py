"""torch's CUDA memory snapshot as a history; pickles are read without trusting them.

A snapshot is a dictionary of plain values: `segments` with their current blocks, and
`device_traces`, one list of events per device, oldest first. Its pickle is what torch's own viewer
opens. Pickles can call anything when loaded, and people send each other snapshots; one made of
plain values refers to no class at all, so the reader here refuses every name.

Events are `alloc`, `free_requested`, `free_completed` and a few about segments. Memory is in use
until its free is completed; between the two it waits for another stream. An `oom` event has the
size that could not be allocated. Keys that a version of torch does not write are absent.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lmlab.measure.memory.blocks import block_sizes, rounded
from lmlab.measure.memory.history import Block, Event, History, Kind

KINDS: dict[str, Kind] = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}
ACTIVE_STATES = {"active_allocated", "active_awaiting_free", "active_pending_free"}


class SnapshotError(ValueError):
    """A file that is not a memory snapshot."""


class PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, strings and numbers; refuses anything that has a name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(f"the pickle names {module}.{name}; a snapshot has plain values only")


def load(path: Path) -> dict[str, Any]:
    """A snapshot from an untrusted pickle."""
    try:
        with path.open("rb") as file:
            found = PlainUnpickler(file).load()
    except (OSError, SnapshotError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise SnapshotError(f"not a readable pickle ({type(error).__name__}: {error})") from error
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise SnapshotError("the pickle has no segments and device_traces")
    return found


def history_of(snapshot: Mapping[str, Any], device_index: int, *, max_entries: int) -> History:
    """What one device's allocator did and holds."""
    traces = snapshot["device_traces"]
    trace = traces[device_index] if device_index < len(traces) else []
    segments = [
        segment
        for segment in snapshot["segments"]
        if segment.get("device", device_index) == device_index
    ]
    live_at_end = list(_active_blocks(segments))
    sizes = {segment["address"]: segment["total_size"] for segment in segments}
    blocks = block_sizes(trace, sizes, (block.address for block in live_at_end))
    return History(
        events=list(_events(trace, iter(blocks))),
        live_at_end=live_at_end,
        dropped=len(trace) >= max_entries,
    )


def _events(trace: list[dict[str, Any]], blocks: Iterator[int]) -> Iterator[Event]:
    for entry in trace:
        kind = KINDS.get(entry["action"])
        if kind is not None:
            yield Event(
                kind=kind,
                address=0 if kind == "oom" else entry["addr"],
                size=entry["size"],
                # Of a block older than the trace only the free is recorded.
                block_bytes=next(blocks) if kind == "alloc" else rounded(entry["size"]),
                frames=entry.get("frames", ()),
            )


def _active_blocks(segments: list[dict[str, Any]]) -> Iterator[Block]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            start = block.get("address", address)
            address = start + block["size"]
            if block["state"] in ACTIVE_STATES:
                yield Block(
                    address=start,
                    size=block.get("requested_size", block["size"]),
                    block_bytes=block["size"],
                    frames=block.get("frames", ()),
                )
