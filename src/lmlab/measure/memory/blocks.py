"""How many bytes the caching allocator really gave: its rule for splitting, replayed on its trace.

An allocation's event has the size that was asked for. `max_memory_allocated` counts the block that
was given, which is larger where cutting off the rest was not worth it: in segments for large
tensors a rest of up to 1 MiB stays with the block. For a model of a few hundred megabytes that adds
up to several percent of the peak, and a block that is gone by the end tells nobody its size.

But it can be worked out. Free neighbours are merged at once, so the free space at an address always
reaches to the next block in use or to the end of its segment; and the trace tells every block's
beginning and every segment's coming and going. What was there when the trace began follows from
what is there at its end, by going through it backwards.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The allocator's own constants, the same on every GPU.
GRAIN = 512
SMALL = 2**20

Entry = Mapping[str, Any]


def given_bytes(
    trace: Sequence[Entry], segments: Mapping[int, int], live: Iterable[int]
) -> list[int]:
    """The bytes of each `alloc` entry's block, in order.

    `segments` (address to size) and `live` (addresses in use) are as the trace left them.
    """
    if any(entry["action"] == "segment_map" for entry in trace):
        # A segment that grows is cut exactly.
        return [rounded(entry["size"]) for entry in trace if entry["action"] == "alloc"]
    space = _Space(*_at_the_beginning(trace, segments, live))
    return [given for entry in trace if (given := space.take(entry)) is not None]


def rounded(size: int) -> int:
    """The smallest block that holds so many bytes."""
    return max(-(-size // GRAIN), 1) * GRAIN


def _at_the_beginning(
    trace: Sequence[Entry], segments: Mapping[int, int], live: Iterable[int]
) -> tuple[dict[int, int], set[int]]:
    """Segments and addresses in use before the first entry."""
    there, used = dict(segments), set(live)
    for entry in reversed(trace):
        match entry["action"]:
            case "segment_alloc":
                there.pop(entry["addr"], None)
            case "segment_free":
                there[entry["addr"]] = entry["size"]
            case "alloc":
                used.discard(entry["addr"])
            case "free_completed":
                used.add(entry["addr"])
    return there, used


class _Space:
    """Segments and the blocks in use inside them, as they change."""

    def __init__(self, segments: Mapping[int, int], used: Iterable[int]) -> None:
        self._sizes = dict(segments)
        self._segments = sorted(segments)
        self._used = sorted(used)

    def take(self, entry: Entry) -> int | None:
        """Follow one entry; the bytes given where it is an allocation."""
        address = entry.get("addr", 0)
        match entry["action"]:
            case "segment_alloc":
                if address not in self._sizes:
                    insort(self._segments, address)
                self._sizes[address] = entry["size"]
            case "segment_free":
                if self._sizes.pop(address, None) is not None:
                    self._segments.remove(address)
            case "free_completed":
                self._forget(address)
            case "alloc":
                given = self._given(address, rounded(entry["size"]))
                insort(self._used, address)
                return given
        return None

    def _given(self, address: int, wanted: int) -> int:
        """All of the free space at the address, or what is wanted if the rest is worth keeping."""
        number = bisect_right(self._segments, address) - 1
        if number < 0:
            return wanted
        start = self._segments[number]
        end = start + self._sizes[start]
        after = bisect_right(self._used, address)
        if after < len(self._used):
            end = min(end, self._used[after])
        rest = end - address - wanted
        if rest < 0:  # outside every segment that is known
            return wanted
        is_kept = rest >= GRAIN if wanted <= SMALL else rest > SMALL
        return wanted if is_kept else wanted + rest

    def _forget(self, address: int) -> None:
        number = bisect_right(self._used, address) - 1
        if number >= 0 and self._used[number] == address:
            del self._used[number]
