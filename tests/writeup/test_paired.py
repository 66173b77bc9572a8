"""Ratios of rounds, their interval, and the three verdicts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.writeup.paired import (
    DifferenceInterval,
    RatioInterval,
    difference_interval,
    judge,
    ratio_interval,
    t_quantile,
)


def test_the_interval_of_a_worked_example() -> None:
    base, arm = [100.0] * 4, [100.0, 102.0, 104.0, 106.0]
    logs = [math.log(a / b) for a, b in zip(arm, base, strict=True)]
    mean = sum(logs) / 4
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3)
    found = ratio_interval(arm, base)
    assert found is not None
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.high == pytest.approx(math.exp(mean + 3.182 * sd / 2))
    assert found.low == pytest.approx(math.exp(mean - 3.182 * sd / 2))
    assert found.rounds == 4


def test_drift_that_both_arms_share_widens_nothing() -> None:
    base = [100.0, 150.0, 90.0, 300.0]
    found = ratio_interval([1.03 * value for value in base], base)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1.03), pytest.approx(1.03))


def test_one_round_has_no_interval() -> None:
    assert ratio_interval([1.0], [1.0]) is None
    assert difference_interval([1.0], [1.0]) is None


def test_differences_are_taken_within_a_round() -> None:
    base = [100.0, 150.0, 90.0, 300.0]
    shifted = difference_interval([value + 7.0 for value in base], base)
    assert shifted == DifferenceInterval(7.0, 7.0, 7.0, 4)
    found = difference_interval([459.0, 714.0, 208.0, 314.0], [0.0] * 4)
    assert found is not None
    ends = (found.difference, found.low, found.high)
    assert ends == pytest.approx((423.75, 75.0, 772.5), abs=1.0)


@given(arm=st.lists(st.floats(1, 100), min_size=2, max_size=9))
def test_swapping_arms_turns_the_interval_over(arm: list[float]) -> None:
    base = [3.0] * len(arm)
    one, other = ratio_interval(arm, base), ratio_interval(base, arm)
    assert one is not None
    assert other is not None
    assert one.low == pytest.approx(1 / other.high)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (7, 2.365), (17, 2.131), (999, 1.98)]
)
def test_untabled_degrees_of_freedom_take_the_wider_interval(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == quantile


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.05, "pass"), (1.06, 1.2, "fail"), (1.0, 1.06, "AMBIGUOUS"), (1.05, 1.06, "AMBIGUOUS")],
)
def test_a_claim_holds_only_with_its_whole_interval(low: float, high: float, verdict: str) -> None:
    assert judge(RatioInterval(1.05, low, high, 8), 1.05) == verdict
