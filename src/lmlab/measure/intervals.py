"""Time intervals as (start, end) pairs: union, intersection, and a reduced set for figures.

Within a set, intervals may touch, nest and repeat (operators call operators, messages are in flight
concurrently), so durations must not be added: the time in which anything happened is the length of
the union, and the time in which both of two things happened is that of the intersection of unions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same time; empty ones are dropped."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    """Time covered by at least one of them."""
    return sum(end - start for start, end in union(intervals))


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The intervals that both sets cover."""
    left, right = union(one), union(other)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def reduced(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """At most `most` intervals, for drawing and not for sums.

    Intervals and the gaps between them alternate; the shortest of either is removed first: a gap
    is closed, an interval is dropped. A dense row stays dense, and many short intervals far
    apart do not merge into long ones.
    """
    edges = np.array([edge for pair in union(intervals) for edge in pair], dtype=np.int64)
    while len(edges) > 2 * most:
        shortest = int(np.diff(edges).argmin())
        edges = np.delete(edges, [shortest, shortest + 1])
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
