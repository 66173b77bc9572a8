"""Stretches of time as (start, end) pairs: joined, cut with each other, thinned out for a picture.

Whether communication hides behind computation is a question about two sets of intervals. Within a
set they may touch, nest and repeat (operators call operators, messages travel side by side), so
durations must not be added: the time in which anything happened is the length of the union, and
the time in which both happened that of the intersection of two unions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches in order, none touching another; empty ones are dropped."""
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
    """Time that at least one of them covers."""
    return sum(end - start for start, end in union(intervals))


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The stretches that both sets cover."""
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
    """At most so many stretches, for eyes and not for sums.

    Stretches and the gaps between them take turns; whichever is shortest goes, a gap by being
    closed, a stretch by being dropped, until few enough are left. So a dense row stays dense, and
    many short stretches far apart do not grow into long ones.
    """
    edges = np.array([edge for stretch in union(intervals) for edge in stretch], dtype=np.int64)
    while len(edges) > 2 * most:
        shortest = int(np.diff(edges).argmin())
        edges = np.delete(edges, [shortest, shortest + 1])
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
