"""A timeline of tens of thousands of events reduced to a few hundred vertices, with every peak.

Every hundredth event would miss the peak, which is often one event wide. Instead the events are cut
into equal buckets, and of each bucket the lowest and the highest position are kept. The overall
peak is the highest of its bucket, so it is always among them.
"""

from __future__ import annotations

from collections.abc import Sequence


def outline(totals: Sequence[int], max_vertices: int) -> list[int]:
    """Positions that outline a curve: its ends, and the lowest and highest of every bucket."""
    if max_vertices < 4:
        raise ValueError(f"max_vertices must be at least 4, got {max_vertices}")
    count = len(totals)
    if count <= max_vertices:
        return list(range(count))
    buckets = (max_vertices - 2) // 2
    chosen = {0, count - 1}
    for number in range(buckets):
        positions = range(number * count // buckets, (number + 1) * count // buckets)
        chosen.add(min(positions, key=totals.__getitem__))
        chosen.add(max(positions, key=totals.__getitem__))
    return sorted(chosen)
