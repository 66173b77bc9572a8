"""torch's CUDA memory snapshot as a history.

A snapshot is a dictionary of plain values: `segments` with their current blocks, and
`device_traces`, one list of events per device, oldest first.

Memory is in use until its `free_completed`; after `free_requested` it may still wait for another
stream. An `oom` event has the size that could not be allocated. `frames` may be absent.

An `alloc` event has the requested size. `max_memory_allocated` counts the allocated block, which is
larger if the remainder was not worth splitting off: by up to 1 MiB, several percent of a small
model's peak. The size of a freed block is recorded nowhere, but can be reconstructed. Free
neighbors are merged immediately, so the free space at an address always extends to the next block
in use or to the end of its segment, and the trace has the start of every block and the creation and
release of every segment: walking it backwards from the final state gives the state at every
allocation.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lmlab.measure.memory.history import Block, Event, History, Kind

Entry = Mapping[str, Any]

# The allocator's own constants, the same on every GPU.
GRANULARITY = 512
MAX_SMALL = 2**20
KINDS: dict[str, Kind] = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}


def history_of(snapshot: Mapping[str, Any], device_index: int, *, max_entries: int) -> History:
    """Events and live blocks of one device's allocator."""
    trace = snapshot["device_traces"][device_index]
    segments = [each for each in snapshot["segments"] if each["device"] == device_index]
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
                # For a block older than the trace, only the free is recorded.
                block_bytes=next(blocks) if kind == "alloc" else rounded(entry["size"]),
                frames=entry.get("frames", ()),
            )


def _active_blocks(segments: list[dict[str, Any]]) -> Iterator[Block]:
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                yield Block(
                    address=block["address"],
                    size=block["requested_size"],
                    block_bytes=block["size"],
                    frames=block.get("frames", ()),
                )


def block_sizes(
    trace: Sequence[Entry], segments: Mapping[int, int], live: Iterable[int]
) -> list[int]:
    """The block size of each `alloc` entry, in order.

    `segments` (address to size) and `live` (addresses in use) are those at the end of the trace.
    """
    if any(entry["action"] == "segment_map" for entry in trace):
        # Expandable segments are split exactly.
        return [rounded(entry["size"]) for entry in trace if entry["action"] == "alloc"]
    sizes, starts, used = dict(segments), sorted(segments), sorted(live)
    found = []
    for entry in reversed(trace):
        address = entry.get("addr", 0)
        at = bisect_left(used, address)
        is_used = used[at : at + 1] == [address]
        match entry["action"]:
            case "segment_alloc":
                sizes.pop(address, None)
                starts = sorted(sizes)
            case "segment_free":
                sizes[address] = entry["size"]
                starts = sorted(sizes)
            case "free_completed" if not is_used:
                used.insert(at, address)
            case "alloc":
                del used[at : at + is_used]
                start = starts[max(bisect_right(starts, address) - 1, 0)] if starts else 0
                end = min([start + sizes.get(start, 0), *used[at : at + 1]])
                found.append(_block_size(rounded(entry["size"]), end - address))
    return found[::-1]


def rounded(size: int) -> int:
    """The smallest block that holds that many bytes."""
    return max(-(-size // GRANULARITY), 1) * GRANULARITY


def _block_size(wanted: int, free: int) -> int:
    """All of the free space, or less if the remainder is worth splitting off."""
    rest = free - wanted
    if rest < 0:  # outside every known segment
        return wanted
    is_split = rest >= GRANULARITY if wanted <= MAX_SMALL else rest > MAX_SMALL
    return wanted if is_split else free
