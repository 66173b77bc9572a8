"""Which ranges are open at a moment: the sweep over all moments agrees with looking at each."""

from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.trace.attribution import STILL_OPEN, paths_at
from lmlab.measure.trace.frames import Path, names

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 2)), max_size=25)
MOMENTS = st.lists(st.tuples(st.integers(-2, 60), st.integers(1, 3)), min_size=1, max_size=40)


def paths(spans: list[tuple[int, int, int]], moments: list[tuple[int, int]]) -> list[Path]:
    """Paths at (time, process) among ranges of (start, length, process)."""
    ranges = pd.DataFrame(spans, columns=["start_ns", "length", "process"], dtype="int64").assign(
        name=names(f"range {row}" for row in range(len(spans)))
    )
    ranges["end_ns"] = (ranges["start_ns"] + ranges["length"]).where(
        ranges["length"] != STILL_OPEN, STILL_OPEN
    )
    times, processes = np.array(moments, dtype=np.int64).T
    return list(paths_at(ranges, processes, times))


@settings(deadline=None)
@given(SPANS, MOMENTS)
def test_a_range_contains_its_start_and_not_its_end(
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
    assert paths(spans, moments) == expected


def test_a_range_that_never_closes_contains_every_later_moment() -> None:
    found = paths([(5, STILL_OPEN, 1)], [(4, 1), (5, 1), (10**18, 1)])
    assert found == [(), ("range 0",), ("range 0",)]
    assert found[1] is found[2], "equal paths share one tuple"
