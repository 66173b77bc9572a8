"""Digits: as many as the measurement carries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.writeup import numbers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12.345, "12.3"),
        (9.996, "10.0"),
        (0.04321, "0.0432"),
        (123456.0, "123,000"),
        (0.0, "0"),
        (-1.5, "−1.50"),
        (6.1e-5, "6.10 × 10⁻⁵"),
        (math.inf, "inf"),
    ],
)
def test_three_significant_digits(value: float, shown: str) -> None:
    assert numbers.significant(value) == shown


@pytest.mark.parametrize(
    ("mean", "sd", "shown"),
    [
        (12.345, 0.123, "12.35 ± 0.12"),
        (1291.52, 1.74647, "1,291.5 ± 1.7"),
        (75.39, 126.28, "75.4 ± 126.3"),
        (12.345, None, "12.3"),
        (12.345, math.nan, "12.3"),
        (12.345, 0.0, "12.3 ± 0.0"),
    ],
    ids=["usual", "thousands", "deviation above the mean", "one sample", "no deviation", "zero"],
)
def test_a_mean_is_printed_to_the_place_of_its_deviation(
    mean: float, sd: float | None, shown: str
) -> None:
    assert numbers.mean_and_deviation(mean, sd) == shown


@given(st.floats(min_value=1e-4, max_value=1e12), st.integers(min_value=1, max_value=6))
def test_rounding_never_moves_a_number_by_more_than_its_last_digit(
    value: float, digits: int
) -> None:
    shown = numbers.significant(value, digits)
    if "×" not in shown:
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


@pytest.mark.parametrize(
    ("count", "shown"),
    [(512, "512 B"), (49152, "48 KiB"), (233472, "228 KiB"), (1.5 * 2**30, "1.50 GiB")],
)
def test_bytes_in_binary_units(count: float, shown: str) -> None:
    assert numbers.binary_bytes(count) == shown


def test_words_around_numbers() -> None:
    assert numbers.counted(1, "point") == "1 point"
    assert numbers.counted(1200, "point") == "1,200 points"
    assert numbers.every(1, "step") == "the only step"
    assert numbers.every(2, "step") == "both steps"
    assert numbers.every(7, "step") == "all 7 steps"
    assert numbers.listed(["a"]) == "a"
    assert numbers.listed(["a", "b", "c"]) == "a, b and c"
    assert numbers.span([1.0, 2.5]) == "1.00 to 2.50"
    assert numbers.span([1.001, 1.002], 2) == "1.0"
    assert numbers.factors([2.5, 1.0]) == "1.00× to 2.50×"
    assert numbers.factors([1.001, 1.002]) == "1.00×"
    assert numbers.signed(-0.047) == "−0.047"
    assert numbers.exact(1024.0) == "1,024"
    assert numbers.exact(0.000244140625) == "0.000244"


@pytest.mark.parametrize(
    ("ratio", "shown"), [(1.0, "0 %"), (1.068, "6.8 %"), (1.66, "66 %"), (2.4, "a factor of 2.4")]
)
def test_how_far_a_ratio_lies_above_one(ratio: float, shown: str) -> None:
    assert numbers.excess(ratio) == shown


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0123, "+1.2 %"), (-0.15, "−15.0 %"), (0.0004, "0.0 %"), (-0.0004, "0.0 %"), (0.0, "0.0 %")],
)
def test_a_deviation_has_its_direction_and_a_tenth_of_a_percent(share: float, text: str) -> None:
    assert numbers.deviation(share) == text
