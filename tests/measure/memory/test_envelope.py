"""A reduced curve keeps its ends and every bucket's peak."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.memory.envelope import outline


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=500), st.integers(4, 60))
def test_the_peak_the_minimum_and_the_ends_are_kept(totals: list[int], max_vertices: int) -> None:
    kept = outline(totals, max_vertices)
    assert len(kept) <= max_vertices
    assert kept == sorted(set(kept))
    assert max(totals[position] for position in kept) == max(totals)
    assert min(totals[position] for position in kept) == min(totals)
    assert {0, len(totals) - 1} <= set(kept)
    if len(totals) <= max_vertices:
        assert kept == list(range(len(totals)))


def test_every_bucket_keeps_its_own_peak() -> None:
    totals = [position % 100 for position in range(1000)]
    kept = outline(totals, 22)
    assert [position for position in kept if totals[position] == 99] == list(range(99, 1000, 100))
