"""A timeline of tens of thousands of events in a few hundred vertices, no peak lost.

Taking every hundredth event would miss the peak, which is often one event wide. Here events are cut
into equal buckets, and of each bucket two moments are kept as they were, the lowest and the
highest, in their order. The highest moment of all is the highest of its bucket, so it is always
among them, with all its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

VERTICES_PER_BUCKET = 2


def kept_positions(totals: Sequence[int], max_vertices: int) -> list[int]:
    """Positions that outline a curve: ends, and the lowest and highest of every bucket."""
    if max_vertices < 2 + VERTICES_PER_BUCKET:
        raise ValueError(f"max_vertices: got {max_vertices}, allowed is 4 or more")
    count = len(totals)
    if count <= max_vertices:
        return list(range(count))
    buckets = (max_vertices - 2) // VERTICES_PER_BUCKET
    kept = {0, count - 1}
    for number in range(buckets):
        positions = range(number * count // buckets, (number + 1) * count // buckets)
        kept.add(min(positions, key=totals.__getitem__))
        kept.add(max(positions, key=totals.__getitem__))
    return sorted(kept)
