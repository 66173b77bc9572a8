"""What dropping warm-up does and when a process settles, in every branch."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.warm_up import enough_warmup, settling, warmup_effect
from tests.writeup.small_study import STEP, data_of, nothing

SLOW = {"forward": [40.0, 1.6], "backward": [6.0, 1.2]}


class TestWarmUp:
    def test_dropping_it_lengthens_the_mean(self) -> None:
        text = warmup_effect(data_of(lambda p: {**STEP, "cold": SLOW}))
        assert text.startswith("Without warm-up the mean step takes 2.6 times as long as after 5")
        assert "for every size. Its standard deviation is" in text
        assert "The first measured step alone takes 16 times the settled pace." in text

    def test_only_some_sizes(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            return {**STEP, "cold": SLOW if point.parameters["size"] == "small" else {}}

        text = warmup_effect(data_of(times))
        assert "after 5 warm-ups for small, and no longer for medium." in text

    def test_no_effect(self) -> None:
        text = warmup_effect(data_of(lambda p: STEP))
        assert text == (
            "Without warm-up the mean step takes the same as after 5 warm-ups, within 10 %, for "
            "every size."
        )

    def test_swapping_the_ends_turns_it_round(self) -> None:
        def times(point: Point) -> dict[str, float]:
            slow = 2.0 if point.parameters["warmup"] == 5 else 1.0
            return {phase: slow * ms for phase, ms in STEP.items()}

        text = warmup_effect(data_of(times))
        assert "less time than after 5 warm-ups for every size: 0.50 times as long" in text

    @pytest.mark.parametrize("keep", [{5}, set()], ids=["one count", "none"])
    def test_missing_counts_are_said(self, keep: set[int]) -> None:
        data = data_of(lambda p: STEP if p.parameters["warmup"] in keep else None)
        assert "fewer than two warm-up counts" in warmup_effect(data)
        assert "fewer than two warm-up counts" in enough_warmup(data)

    def test_no_size_with_both_ends(self) -> None:
        keep = {("small", 0), ("medium", 5)}
        data = data_of(
            lambda p: STEP if (p.parameters["size"], p.parameters["warmup"]) in keep else None
        )
        assert "no size has both ends" in warmup_effect(data)

    def test_the_smallest_count_that_is_enough(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            slow = [40.0] if point.parameters["size"] == "small" else [40.0] * 5
            return {**STEP, "cold": {"forward": slow}}

        assert enough_warmup(data_of(times)) == (
            "The mean after 5 is reached, within 10 %, with 1 warm-up for small. "
            "For medium 1 are not yet enough."
        )

    def test_settling_step_of_each_size(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            slow = [40.0] if point.parameters["size"] == "small" else [40.0, 40.0, 2.0]
            return {**STEP, "cold": {"forward": slow}}

        assert settling(data_of(times)) == (
            "A fresh process settles at step 2 for small and at step 4 for medium."
        )

    def test_a_process_that_never_settles(self) -> None:
        data = data_of(lambda p: {**STEP, "spread": 0.5})
        assert settling(data) == "It does not settle within the steps taken for every size."

    def test_no_cold_start_is_said(self) -> None:
        assert "no cold start was measured" in settling(data_of(nothing))
