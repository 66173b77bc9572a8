"""Faster, slower, or nothing to tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.writeup.comparison import Timed, agree, verdict


def timed(median: float, half_width: float = 0.01) -> Timed:
    return Timed(median, median * (1 - half_width), median * (1 + half_width))


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (timed(5.0), "faster"),
        (timed(20.0), "slower"),
        (timed(10.1), "same"),
        (timed(9.85, 0.001), "same"),
        (timed(8.0, 0.3), "same"),
    ],
    ids=["half", "double", "touching", "apart but within 2 %", "noisy"],
)
def test_a_verdict_needs_a_gap_beyond_noise(arm: Timed, expected: str) -> None:
    assert verdict(arm, timed(10.0)) == expected


def test_within_one_process_a_small_gap_is_enough() -> None:
    assert verdict(timed(9.85, 0.001), timed(10.0, 0.001), margin=0.0) == "faster"


def test_across_processes_the_middle_halves_stay_apart_by_the_margin() -> None:
    assert verdict(timed(5.0), timed(10.0), margin=0.9) == "faster"
    assert verdict(timed(5.0), timed(10.0), margin=1.0) == "same"
    assert verdict(timed(5.0, 0.2), timed(10.0, 0.2), margin=0.5) == "same"


TIMES = st.builds(timed, st.floats(0.01, 1e4), st.floats(0, 0.5))


@given(TIMES, TIMES, st.floats(0, 2))
def test_swapping_the_arms_turns_the_verdict_round(one: Timed, other: Timed, by: float) -> None:
    opposite = {"faster": "slower", "slower": "faster", "same": "same"}
    assert verdict(one, other, margin=by) == opposite[verdict(other, one, margin=by)]


@given(TIMES)
def test_a_measurement_agrees_with_itself(one: Timed) -> None:
    assert agree(one, one, margin=0.0)


def test_agreement_is_within_noise_or_margin() -> None:
    assert agree(timed(10.0), timed(10.3), margin=0.05)
    assert not agree(timed(10.0), timed(13.0), margin=0.05)
    assert agree(timed(10.0, 0.2), timed(13.0, 0.2), margin=0.05)
