"""How long a step takes, in every branch."""

from __future__ import annotations

import re

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings import end_to_end as findings
from lmlab.writeup.findings.step_times import backward_ratio, growth, phase_range
from lmlab.writeup.frames.end_to_end import frame
from tests.writeup import synthetic
from tests.writeup.small_study import STEP, collected_of, data_of, nothing


class TestHowLong:
    def test_names_the_fastest_and_the_slowest_point(self) -> None:
        data = data_of(lambda p: {**STEP, "forward": p.parameters["context"] / 10})
        assert phase_range(data, "fp32", "forward") == (
            "Forward in fp32 takes from 12.8 ms (small at context 128) to 25.6 ms "
            "(small at context 256), 2.0 times as long."
        )

    def test_one_point_has_no_range(self) -> None:
        data = data_of(lambda p: STEP if dict(p.parameters)["size"] == "small"
                       and p.parameters["context"] == 128 else None)  # fmt: skip
        assert phase_range(data, "fp32", "backward").endswith(
            "20.0 ms (small at context 128), the only point measured."
        )

    def test_no_data_is_said(self) -> None:
        assert (
            phase_range(data_of(nothing), "fp32", "forward") == "Forward in fp32 was not measured."
        )

    @pytest.mark.parametrize(
        ("exponent", "relation"),
        [(1.0, "about in proportion"), (1.5, "more than in proportion"), (0.5, "less than in")],
    )
    def test_growth_with_context(self, exponent: float, relation: str) -> None:
        def times(point: Point) -> dict[str, float]:
            factor = (point.parameters["context"] / 128) ** exponent
            return {phase: ms * factor for phase, ms in STEP.items()}

        assert growth(data_of(times), "fp32").count(relation) == 2, "smallest and largest size"

    def test_growth_within_the_noise_between_processes_is_no_departure(self) -> None:
        def times(point: Point) -> dict[str, float]:
            factor = (point.parameters["context"] / 128) ** 0.5
            pace = 2.0 if point.parameters["start"] == "cold" else 1.0
            return {phase: ms * factor * pace for phase, ms in STEP.items()}

        assert growth(data_of(times), "fp32").count("(in proportion within noise)") == 2

    def test_growth_needs_two_contexts(self) -> None:
        data = data_of(lambda p: STEP if p.parameters["context"] == 128 else None)
        assert "no size has two contexts" in growth(data, "fp32")

    def test_only_the_modes_of_the_study_are_named(self) -> None:
        assert findings.modes(data_of(lambda p: STEP)) == (
            "Every size and context is timed in 2 modes: forward alone (no gradient) and a whole "
            "training step."
        )
        assert findings.modes(data_of(lambda p: STEP).iloc[:0]).startswith("The study asks for no")


class TestBackwardAgainstForward:
    def test_longer_everywhere(self) -> None:
        assert backward_ratio(data_of(lambda p: STEP)).startswith(
            "Backward takes longer than forward in all 8 training steps: backward takes 2.00"
        )

    def test_the_swapped_phases_turn_it_round(self) -> None:
        swapped = {**STEP, "forward": 20.0, "backward": 10.0}
        assert backward_ratio(data_of(lambda p: swapped)).startswith(
            "Backward takes less time than forward in all 8 training steps: backward takes 0.500"
        )

    def test_mixed(self) -> None:
        def times(point: Point) -> dict[str, float]:
            return {**STEP, "backward": 5.0 if point.parameters["size"] == "small" else 20.0}

        assert "longer than forward in 4 of 8 training steps and less time in 4" in backward_ratio(
            data_of(times)
        )

    def test_within_noise(self) -> None:
        text = backward_ratio(data_of(lambda p: {**STEP, "backward": 10.0}))
        assert "longer than forward in 0 of 8 training steps and the same within noise in 8" in text

    def test_a_single_step_within_noise_is_named(self) -> None:
        def times(point: Point) -> dict[str, float]:
            only = {"size": "small", "context": 128, "precision": "bf16"}
            return {**STEP, "backward": 10.0 if only.items() <= point.parameters.items() else 20.0}

        assert "within noise in 1 (small at context 128, bf16): " in backward_ratio(data_of(times))

    def test_no_data_is_said(self) -> None:
        assert "no training step was measured" in backward_ratio(data_of(nothing))


class TestUtilisation:
    def test_peak_and_ceiling(self) -> None:
        collected = synthetic.collected("end_to_end")
        text = findings.utilisation(collected, frame(collected))
        assert re.search(r"In fp32 .* % of the stated peak \(MFU\) and .* % of the measured", text)

    def test_no_sourced_peak_no_mfu(self) -> None:
        collected = synthetic.collected("end_to_end", "cpu")
        text = findings.utilisation(collected, frame(collected))
        assert "no MFU, there is no sourced peak for Test Processor 2 @ 2.0 GHz (CPU)" in text

    def test_unknown_flops(self) -> None:
        collected = collected_of(lambda p: {**STEP, "data": {"flops": None}})
        assert "no training step with known FLOPs" in findings.utilisation(
            collected, frame(collected)
        )

    def test_nothing_measured(self) -> None:
        collected = collected_of(nothing)
        assert findings.summary(collected, frame(collected)) == "No training step was measured."
