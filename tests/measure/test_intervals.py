"""Unions, intersections and reduced sets of intervals, against counting tick by tick."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.intervals import Interval, intersection, length, reduced, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for start, end in intervals for tick in range(start, end)}


@given(intervals=INTERVALS)
def test_a_union_is_disjoint_and_covers_the_same_ticks(
    intervals: list[Interval],
) -> None:
    joined = union(intervals)
    assert ticks(joined) == ticks(intervals)
    assert length(intervals) == len(ticks(intervals))
    assert all(one[1] < other[0] for one, other in pairwise(joined))


@given(one=INTERVALS, other=INTERVALS)
def test_an_intersection_has_the_ticks_of_both(one: list[Interval], other: list[Interval]) -> None:
    assert ticks(intersection(one, other)) == ticks(one) & ticks(other)


@given(intervals=INTERVALS, most=st.integers(1, 5))
def test_a_reduced_set_has_few_intervals_or_is_the_union(
    intervals: list[Interval], most: int
) -> None:
    kept = reduced(intervals, most)
    assert len(kept) == min(most, len(union(intervals)))
    if len(union(intervals)) <= most:
        assert kept == union(intervals)


def test_short_intervals_far_apart_do_not_merge() -> None:
    work = [(0, 1000), *((start, start + 1) for start in range(2000, 9000, 100))]
    assert length(reduced(work, 10)) < 1.1 * length(work)


def test_the_shortest_gaps_are_closed_first() -> None:
    assert reduced([(0, 10), (11, 20), (50, 60), (63, 70)], 2) == [(0, 20), (50, 70)]
