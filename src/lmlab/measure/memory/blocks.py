"""How many bytes the caching allocator really gave: its splitting rule, replayed on its trace.

An allocation event has the requested size. `max_memory_allocated` counts the block that was given,
which is larger if splitting off the remainder was not worth it: in segments for large tensors a
remainder of up to 1 MiB stays with the block. For a model of a few hundred megabytes that adds up
to several percent of the peak, and the size of a block that was freed before the end is recorded
nowhere.

But it can be computed. Free neighbours are merged immediately, so the free space at an address
always extends to the next block in use or to the end of its segment, and the trace has the start of
every block and the creation and release of every segment. The state at the start of the trace
follows from the state at its end by going through it backwards.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The allocator's own constants, the same on every GPU.
GRANULARITY = 512
MAX_SMALL = 2**20

Entry = Mapping[str, Any]


def block_sizes(
    trace: Sequence[Entry], segments: Mapping[int, int], live: Iterable[int]
) -> list[int]:
    """The block size of each `alloc` entry, in order.

    `segments` (address to size) and `live` (addresses in use) are those at the end of the trace.
    """
    if any(entry["action"] == "segment_map" for entry in trace):
        # Expandable segments are split exactly.
        return [rounded(entry["size"]) for entry in trace if entry["action"] == "alloc"]
    state = _Segments(*_at_start(trace, segments, live))
    return [size for entry in trace if (size := state.apply(entry)) is not None]


def rounded(size: int) -> int:
    """The smallest block that holds that many bytes."""
    return max(-(-size // GRANULARITY), 1) * GRANULARITY


def _at_start(
    trace: Sequence[Entry], segments: Mapping[int, int], live: Iterable[int]
) -> tuple[dict[int, int], set[int]]:
    """Segments and addresses in use before the first entry."""
    sizes, used = dict(segments), set(live)
    for entry in reversed(trace):
        match entry["action"]:
            case "segment_alloc":
                sizes.pop(entry["addr"], None)
            case "segment_free":
                sizes[entry["addr"]] = entry["size"]
            case "alloc":
                used.discard(entry["addr"])
            case "free_completed":
                used.add(entry["addr"])
    return sizes, used


class _Segments:
    """The segments and the blocks in use inside them, as they change."""

    def __init__(self, sizes: Mapping[int, int], used: Iterable[int]) -> None:
        self._sizes = dict(sizes)
        self._starts = sorted(sizes)
        self._used = sorted(used)

    def apply(self, entry: Entry) -> int | None:
        """Apply one entry; the block size if it is an allocation."""
        address = entry.get("addr", 0)
        match entry["action"]:
            case "segment_alloc":
                if address not in self._sizes:
                    insort(self._starts, address)
                self._sizes[address] = entry["size"]
            case "segment_free":
                if self._sizes.pop(address, None) is not None:
                    self._starts.remove(address)
            case "free_completed":
                number = bisect_right(self._used, address) - 1
                if number >= 0 and self._used[number] == address:
                    del self._used[number]
            case "alloc":
                size = self._block_size(address, rounded(entry["size"]))
                insort(self._used, address)
                return size
        return None

    def _block_size(self, address: int, wanted: int) -> int:
        """The whole free space at the address, or less if the remainder is worth splitting off."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return wanted
        start = self._starts[number]
        end = start + self._sizes[start]
        following = bisect_right(self._used, address)
        if following < len(self._used):
            end = min(end, self._used[following])
        rest = end - address - wanted
        if rest < 0:  # outside every known segment
            return wanted
        is_split = rest >= GRANULARITY if wanted <= MAX_SMALL else rest > MAX_SMALL
        return wanted if is_split else wanted + rest
