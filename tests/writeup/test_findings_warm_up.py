"""What dropping warm-up does and when a process settles, in every branch."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.warm_up import enough_warmup, settling, warmup_effect
from lmlab.writeup.tables.end_to_end import warmup
from tests.writeup.small_study import STEP, collected_of, data_of, nothing

SLOW = {"forward": [40.0, 1.6], "backward": [6.0, 1.2]}


def restless(point: Point, which: set[tuple[str, int]], **others: Any) -> dict[str, Any]:
    """Steps that jump about in the processes named, by size and warm-up count."""
    key = (point.parameters["size"], point.parameters["warmup"])
    return {**STEP, **others, "spread": 0.5 if key in which else 0.004}


def slowing(point: Point, which: set[tuple[str, int]]) -> dict[str, Any]:
    """Forward takes a fifth of its time in the first half of the steps of the processes named."""
    key = (point.parameters["size"], point.parameters["warmup"])
    early = [0.2] * ((10 + int(point.parameters["warmup"])) // 2)
    return {**STEP, "cold": {"forward": early if key in which else []}, "spread": 0.0}


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
        assert warmup_effect(data).endswith(
            "no size has processes that keep one pace at both ends of the warm-up range."
        )

    def test_the_smallest_count_that_is_enough(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            slow = [40.0] if point.parameters["size"] == "small" else [40.0] * 5
            return {**STEP, "cold": {"forward": slow}}

        assert enough_warmup(data_of(times)) == (
            "It takes at most 1 warm-up for small and at most 5 warm-ups for medium until the mean "
            "stays within 10 % above that pace."
        )

    def test_a_relapse_after_more_warm_up_counts(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            late = [1.0, 40.0] if point.parameters["warmup"] == 1 else []
            return {**STEP, "cold": {"forward": late}}

        assert enough_warmup(data_of(times)).startswith(
            "It takes at most 5 warm-ups for every size"
        )

    def test_not_even_the_most_is_enough(self) -> None:
        data = data_of(lambda p: {**STEP, "cold": {"forward": [1.0] * 5 + [40.0]}})
        assert enough_warmup(data) == "For every size 5 warm-ups are not enough."

    def test_a_process_that_never_settles_says_nothing_about_warm_up(self) -> None:
        data = data_of(lambda p: restless(p, {("small", 1)}, cold={"forward": [40.0]}))
        assert enough_warmup(data) == (
            "It takes at most 1 warm-up for medium and at most 5 warm-ups for small until the mean "
            "stays within 10 % above that pace. "
            "Processes that do not keep one pace (1 of 3 of small) say nothing about it."
        )

    def test_its_high_mean_does_not_ask_for_more_warm_up(self) -> None:
        data = data_of(lambda p: restless(p, {("small", 5)}, cold={"forward": [40.0]}))
        assert enough_warmup(data).startswith("It takes at most 1 warm-up for every size until")

    def test_the_most_is_the_most_of_those_that_settle(self) -> None:
        late = {"forward": [1.0] * 5 + [40.0]}
        data = data_of(lambda p: restless(p, {("medium", 5)}, cold=late))
        assert enough_warmup(data) == (
            "For medium 1 warm-up is not enough. For small 5 warm-ups are not enough. "
            "Processes that do not keep one pace (1 of 3 of medium) say nothing about it."
        )

    def test_a_process_that_slows_down_later_says_nothing_about_warm_up(self) -> None:
        data = data_of(lambda p: slowing(p, {("medium", 0), ("medium", 1)}))
        assert enough_warmup(data).endswith(
            "Processes that do not keep one pace (2 of 3 of medium) say nothing about it."
        )

    def test_no_process_keeps_one_pace(self) -> None:
        data = data_of(lambda p: {**STEP, "spread": 0.5})
        assert enough_warmup(data).endswith("is not known: no process keeps one pace.")

    def test_a_size_without_a_pace_at_both_ends_is_not_compared(self) -> None:
        text = warmup_effect(data_of(lambda p: restless(p, {("small", 5)}, cold=SLOW)))
        assert text.startswith(
            "Without warm-up the mean step is 2.6 times the pace at which its own process settles "
            "for medium; after"
        )


class TestSettling:
    def test_step_of_each_size(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            slow = [40.0] if point.parameters["size"] == "small" else [40.0, 40.0, 2.0]
            return {**STEP, "cold": {"forward": slow}}

        assert settling(data_of(times)) == (
            "A fresh process settles by step 2 for small and by step 4 for medium."
        )

    def test_processes_that_never_settle_are_counted(self) -> None:
        never = {("small", 1), ("medium", 0), ("medium", 1), ("medium", 5)}
        assert settling(data_of(lambda p: restless(p, never))) == (
            "A fresh process that settles does so by step 1 for small. "
            "Of small, 1 of 3 processes does not settle within the steps taken. "
            "Of medium, 3 of 3 processes do not settle within the steps taken."
        )

    def test_no_process_settles(self) -> None:
        assert settling(data_of(lambda p: {**STEP, "spread": 0.5})).startswith("Of small, 3 of 3")

    def test_slowing_down_is_a_change_of_pace_and_not_settling(self) -> None:
        assert settling(data_of(lambda p: slowing(p, {("medium", 1)}))) == (
            "A fresh process settles by step 1 for every size. "
            "Of medium, 1 of 3 processes slows down after settling, from 24.0 to 32.0 ms a step, "
            "which warm-up does not explain."
        )

    @pytest.mark.parametrize(
        ("forward_ms", "cause"),
        [
            (1.5, "; the GPU is busy for 23.5 ms of it, so it is the host that slowed."),
            (9.0, ", which warm-up does not explain."),
        ],
        ids=["GPU faster than either pace", "GPU busier than the faster pace allows"],
    )
    def test_the_host_is_named_where_the_gpu_leaves_nothing_else(
        self, forward_ms: float, cause: str
    ) -> None:
        busy = {"forward": forward_ms, "backward": 20.0, "optimizer": 2.0}
        text = settling(data_of(lambda p: {**slowing(p, {("small", 0)}), "busy_ms": busy}))
        assert text.endswith(f"slows down after settling, from 24.0 to 32.0 ms a step{cause}")

    def test_several_that_slow_down(self) -> None:
        text = settling(data_of(lambda p: slowing(p, {("small", 0), ("small", 1)})))
        assert "Of small, 2 of 3 processes slow down after settling, from 24.0 to 32.0 ms" in text
        assert "and from 24.0 to 32.0 ms a step" in text

    def test_a_single_fast_step_is_no_change_of_pace(self) -> None:
        data = data_of(lambda p: {**STEP, "cold": {"forward": [1.0, 0.2]}})
        assert settling(data) == "A fresh process settles by step 1 for every size."

    def test_no_cold_start_is_said(self) -> None:
        assert "no cold start was measured" in settling(data_of(nothing))

    def test_the_table_says_the_same_as_the_sentences(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            if point.parameters["size"] == "medium":
                return slowing(point, {("medium", 1)})
            return restless(point, {("small", 1)}, cold={"forward": [40.0]})

        table = warmup(collected_of(times), data_of(times))
        cells = {(row[0], row[1]): row[-1] for row in table.rows}
        assert cells["small", "0"] == "2"
        assert cells["small", "1"] == "not within 11"
        assert cells["medium", "1"] == "1, then slower"
        assert "no step from there on more than 10 % above the median" in table.caption
        assert "then slower: " in table.caption
