"""What communication adds to a step: worked by hand, minimised, and found again from its times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.writeup.overhead_model import Sent, added_ms, best_messages, fit

LINK = {"bytes_per_ms": 1e6, "call_ms": 0.5}


def test_after_backward_every_byte_and_every_call_counts() -> None:
    assert added_ms(100e6, 10, 0.0, **LINK) == pytest.approx(100 + 10 * 0.5)


def test_during_backward_all_but_the_first_share_of_it_hides_messages() -> None:
    assert added_ms(100e6, 10, 40.0, **LINK) == pytest.approx(105 - 40 * 0.9)


def test_one_message_leaves_when_backward_is_over() -> None:
    assert added_ms(100e6, 1, 40.0, **LINK) == added_ms(100e6, 1, 0.0, **LINK)


def test_nothing_hides_the_last_message() -> None:
    assert added_ms(10e6, 10, 1000.0, **LINK) == pytest.approx(1.5)


def test_where_the_link_is_the_limit_the_best_number_is_a_root() -> None:
    best = best_messages(500e6, 80.0, **LINK)
    assert best == pytest.approx(math.sqrt(80 / 0.5), abs=1)


@given(
    hide=st.floats(0.1, 1000), megabytes=st.floats(1, 1000), call=st.floats(0.001, 5),
    rate=st.floats(1e4, 1e8),
)  # fmt: skip
def test_no_other_number_of_messages_is_better(
    hide: float, megabytes: float, call: float, rate: float
) -> None:
    link = {"bytes_per_ms": rate, "call_ms": call}
    best = best_messages(megabytes * 1e6, hide, **link)
    least = added_ms(megabytes * 1e6, best, hide, **link)
    for other in {1, 2, 3, 7, 30, 300, 3000, max(1, best - 1), best + 1}:
        assert least <= 1.02 * added_ms(megabytes * 1e6, other, hide, **link)


def variants(rate: float, call: float, noise: float = 0.0) -> list[Sent]:
    total = 500_000_000
    kinds = [("naive", 111, 0.0), ("flat", 1, 0.0), ("overlapped", 111, 80.0)]
    kinds += [(f"bucketed_{n}", n, 80.0) for n in (2, 5, 20, 50)]
    return [
        Sent(
            name=name, total_bytes=total, messages=number, hide_ms=hide,
            added_ms=(1 + noise * (-1) ** number)
            * added_ms(total, number, hide, bytes_per_ms=rate, call_ms=call),
        )
        for name, number, hide in kinds
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "call"), [(1e6, 0.5), (2e7, 0.05), (3e5, 4.0)])
def test_a_fit_finds_the_link_that_made_the_times(rate: float, call: float) -> None:
    found = fit(variants(rate, call))
    assert found is not None
    assert found.bytes_per_ms == pytest.approx(rate, rel=0.02)
    assert found.call_ms == pytest.approx(call, rel=0.05)
    assert found.missed_share < 0.01
    assert found.gb_per_s == pytest.approx(rate / 1e6, rel=0.02)


def test_a_fit_says_how_much_it_misses() -> None:
    found = fit(variants(1e6, 0.5, noise=0.2))
    assert found is not None
    assert 0.05 < found.missed_share < 0.3


def test_two_variants_are_too_few() -> None:
    assert fit(variants(1e6, 0.5)[:2]) is None
