"""What dropping warm-up does and when a process settles, in every branch."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.warm_up import enough_warmup, settling, warmup_effect
from tests.writeup.small_study import STEP, data_of, nothing

SLOW = {"forward": [40.0, 1.6], "backward": [6.0, 1.2]}


class TestWarmUp:
    def test_dropping_it_lifts_the_mean(self) -> None:
        text = warmup_effect(data_of(lambda p: {**STEP, "cold": SLOW}))
        assert text.startswith(
            "Without warm-up the mean step is 2.6 times the pace at which its own process settles "
            "for every size; after 5 warm-ups it is 1.0 times that pace. "
        )
        assert "The first measured step alone takes 16 times it." in text
        assert "The standard deviation without warm-up is " in text

    def test_only_some_sizes(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            return {**STEP, "cold": SLOW if point.parameters["size"] == "small" else {}}

        text = warmup_effect(data_of(times))
        assert "settles for small, and at most 10 % above it for medium; after 5" in text

    def test_no_effect(self) -> None:
        text = warmup_effect(data_of(lambda p: STEP))
        assert text.startswith(
            "Without warm-up the mean step is at most 10 % above the pace at which its own process "
            "settles for every size; after 5 warm-ups it is 1.0 times that pace."
        )

    def test_swapping_the_ends_turns_it_round(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            late = [*[1.0] * 5, 40.0] if point.parameters["warmup"] == 5 else []
            return {**STEP, "cold": {"forward": late}}

        text = warmup_effect(data_of(times))
        assert "Without warm-up the mean step is at most 10 % above" in text
        assert "after 5 warm-ups it is 2.2 times that pace, which warm-up does not explain." in text

    def test_the_pace_of_another_process_does_not_count(self) -> None:
        def times(point: Point) -> dict[str, float]:
            pace = 2.0 if point.parameters["warmup"] == 0 else 1.0
            return {phase: pace * ms for phase, ms in STEP.items()}

        assert "at most 10 % above" in warmup_effect(data_of(times))
        assert enough_warmup(data_of(times)).startswith("It takes no warm-up for every size until")

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
            "It takes 1 warm-up for small and 5 warm-ups for medium until the mean stays at most "
            "10 % above that pace."
        )

    def test_a_relapse_after_more_warm_up_counts(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            late = [1.0, 40.0] if point.parameters["warmup"] == 1 else []
            return {**STEP, "cold": {"forward": late}}

        assert enough_warmup(data_of(times)).startswith("It takes 5 warm-ups for every size")

    def test_not_even_the_most_is_enough(self) -> None:
        data = data_of(lambda p: {**STEP, "cold": {"forward": [1.0] * 5 + [40.0]}})
        assert enough_warmup(data) == "For every size 5 warm-ups are not enough."

    def test_settling_step_of_each_size(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            slow = [40.0] if point.parameters["size"] == "small" else [40.0, 40.0, 2.0]
            return {**STEP, "cold": {"forward": slow}}

        assert settling(data_of(times)) == (
            "A fresh process settles by step 2 for small and by step 4 for medium."
        )

    def test_processes_that_never_settle_are_counted(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            p = point.parameters
            restless = (p["size"], p["warmup"]) == ("small", 1) or p["size"] == "medium"
            return {**STEP, "spread": 0.5 if restless else 0.004}

        assert settling(data_of(times)) == (
            "Of small, 1 of 3 processes does not settle within the steps taken. "
            "Of medium, 3 of 3 processes do not settle within the steps taken."
        )

    def test_no_cold_start_is_said(self) -> None:
        assert "no cold start was measured" in settling(data_of(nothing))
