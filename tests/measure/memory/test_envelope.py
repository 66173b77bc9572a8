"""A reduced curve keeps its ends and every bucket's peak, the highest above all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.memory.envelope import kept_positions


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=500), st.integers(4, 60))
def test_the_peak_the_lowest_point_and_the_ends_are_never_lost(
    totals: list[int], max_vertices: int
) -> None:
    kept = kept_positions(totals, max_vertices)
    assert len(kept) <= max(max_vertices, len(kept) if len(totals) <= max_vertices else 0)
    assert kept == sorted(set(kept))
    assert max(totals[position] for position in kept) == max(totals)
    assert min(totals[position] for position in kept) == min(totals)
    assert {0, len(totals) - 1} <= set(kept)


def test_a_spike_of_one_event_survives_a_hundredfold_reduction() -> None:
    totals = [10] * 20_000
    totals[12_345] = 99
    assert 12_345 in kept_positions(totals, 200)


def test_every_bucket_keeps_its_own_peak() -> None:
    totals = [position % 100 for position in range(1000)]
    kept = kept_positions(totals, 22)
    assert [position for position in kept if totals[position] == 99] == list(range(99, 1000, 100))


def test_a_short_curve_is_kept_whole() -> None:
    assert kept_positions([5, 1, 4], 4) == [0, 1, 2]


def test_too_few_vertices_are_no_outline() -> None:
    with pytest.raises(ValueError, match="max_vertices: got 3, allowed is 4 or more"):
        kept_positions([1, 2], 3)
