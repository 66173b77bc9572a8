"""Which ranges are open at a moment: the walk over all moments agrees with looking at each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.trace.attribution import STILL_OPEN, Ranges, paths_at
from lmlab.measure.trace.frames import Coded, Path

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 2)), max_size=25)
MOMENTS = st.lists(st.tuples(st.integers(-2, 60), st.integers(1, 3)), min_size=1, max_size=40)


def opened(spans: list[tuple[int, int, int]]) -> Ranges:
    """Ranges from (start, length, process), each of a name of its own."""
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return Ranges(
        names=Coded.of([f"range {row}" for row in range(len(spans))]),
        start_ns=columns[:, 0],
        end_ns=columns[:, 0] + columns[:, 1],
        thread=columns[:, 2],
        process=columns[:, 2],
    )


def paths(ranges: Ranges, moments: list[tuple[int, int]]) -> list[Path]:
    times, processes = np.array(moments, dtype=np.int64).T
    return list(paths_at(ranges, processes, times).objects())


@given(SPANS, MOMENTS)
def test_a_range_holds_its_start_and_not_its_end(
    spans: list[tuple[int, int, int]], moments: list[tuple[int, int]]
) -> None:
    outermost_first = sorted(range(len(spans)), key=lambda row: (spans[row][0], -spans[row][1]))
    expected = [
        tuple(
            f"range {row}"
            for row in outermost_first
            if spans[row][2] == process and spans[row][0] <= time < spans[row][0] + spans[row][1]
        )
        for time, process in moments
    ]
    assert paths(opened(spans), moments) == expected


def test_a_range_that_never_closes_holds_every_later_moment() -> None:
    ranges = opened([(5, 0, 1)])
    ranges.end_ns[:] = STILL_OPEN
    assert paths(ranges, [(4, 1), (5, 1), (10**18, 1)]) == [(), ("range 0",), ("range 0",)]


def test_rows_of_equal_path_share_one_object() -> None:
    found = paths(opened([(0, 10, 1)]), [(3, 1), (4, 1)])
    assert found[0] is found[1]


def test_columns_one_below_the_other_know_each_value_once() -> None:
    first, second = Coded.of(["a", "b", "a"]), Coded.of(["b", "c"])
    both = Coded.stacked([first, second])
    assert list(both.objects()) == ["a", "b", "a", "b", "c"]
    assert list(both.values) == ["a", "b", "c"]
