"""Where a precision pays, in every branch, and turned round with its data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.findings import end_to_end as findings
from lmlab.writeup.findings.speedup import control, in_phase, speedup_findings, starts_to_pay
from lmlab.writeup.frames.end_to_end import of
from lmlab.writeup.frames.speedup import speedups
from tests.writeup import synthetic
from tests.writeup.small_study import STEP, collected_of, data_of, nothing


def waiting(bf16: float, cold: float) -> dict[str, str]:
    """Findings where bf16 is so many times as fast, and a cold process so many times as slow."""

    def times(point: Point) -> dict[str, float]:
        p = point.parameters
        slow = cold if p["start"] == "cold" else 1 / bf16 if p["precision"] == "bf16" else 1.0
        return {phase: slow * ms for phase, ms in STEP.items()}

    return speedup_findings(data_of(times), "bf16")


def speeds(bf16: Callable[[Point], float]) -> pd.DataFrame:
    """Steps whose bf16 arm is so many times as fast."""

    def times(point: Point) -> dict[str, float]:
        factor = bf16(point) if point.parameters["precision"] == "bf16" else 1.0
        return {phase: ms / factor for phase, ms in STEP.items()}

    return of(speedups(data_of(times), "bf16"), what="whole step")


class TestSpeedUp:
    def test_everywhere(self) -> None:
        ratios = speeds(lambda p: 2.0)
        assert starts_to_pay(ratios, "bf16").startswith("bf16 pays everywhere")
        assert in_phase(ratios, "whole step", "bf16") == (
            "Whole step: bf16 is faster at all 4 places (small and medium at every context), up to "
            "2.00× (small at context 128)."
        )

    def test_nowhere(self) -> None:
        ratios = speeds(lambda p: 0.5)
        assert starts_to_pay(ratios, "bf16").startswith("bf16 does not pay")
        assert in_phase(ratios, "whole step", "bf16").startswith(
            "Whole step: bf16 is slower at all 4 places"
        )

    def test_from_a_place_on(self) -> None:
        def factor(point: Point) -> float:
            if point.parameters["size"] == "medium":
                return 3.0
            return 1.5 if point.parameters["context"] == 256 else 0.8

        ratios = speeds(factor)
        assert starts_to_pay(ratios, "bf16") == (
            "bf16 starts to pay with small at context 256, the smallest training step that is "
            "faster than in fp32 beyond noise (1.50×); 3 of 4 steps are."
        )
        assert in_phase(ratios, "whole step", "bf16") == (
            "Whole step: bf16 is faster at 3 of 4 places (small at context 256; medium at every "
            "context), up to 3.00× (medium at context 128); bf16 is slower at 1 of 4 places (small "
            "at context 128), down to 0.800× (small at context 128)."
        )

    def test_within_noise(self) -> None:
        ratios = speeds(lambda p: 1.01)
        assert "does not pay" in starts_to_pay(ratios, "bf16")
        assert "the same time within noise at every place" in in_phase(ratios, "forward", "bf16")

    def test_partly_within_noise(self) -> None:
        ratios = speeds(lambda p: 2.0 if p.parameters["size"] == "medium" else 1.0)
        assert in_phase(ratios, "forward", "bf16").endswith("; within noise at 2 of 4 places.")

    def test_a_speed_up_must_exceed_what_processes_differ_by(self) -> None:
        assert waiting(bf16=1.5, cold=1.2)["pays_bf16"].startswith("bf16 pays everywhere")
        assert waiting(bf16=1.5, cold=1.6)["pays_bf16"].startswith("bf16 does not pay")
        assert waiting(bf16=1 / 1.5, cold=1.6)["speedup_bf16_whole_step"].endswith(
            "take the same time within noise at every place."
        )

    def test_the_optimizer_is_a_control(self) -> None:
        assert waiting(bf16=1.1, cold=1.2)["speedup_bf16_optimizer"] == (
            "Optimizer: the same work in fp32 and in bf16, hence a control. Its ratio, 1.10× "
            "(small at context 128) to 1.10× (small at context 128), is what the comparison itself "
            "adds, within noise at every place."
        )

    def test_a_control_at_one_place_has_no_range(self) -> None:
        text = control(speeds(lambda p: 2.0).iloc[:1], "optimizer", "bf16")
        assert "Its ratio, 2.00× (small at context 128), is what" in text
        assert "it is beyond noise at the only place (small at context 128)" in text

    def test_a_control_that_fails_casts_doubt(self) -> None:
        ratios = speeds(lambda p: 2.0 if p.parameters["size"] == "small" else 1.0)
        text = control(ratios, "optimizer", "bf16")
        assert "is faster" not in text
        assert text.endswith(
            "it is beyond noise at 2 of 4 places (small at every context), where the ratios of "
            "other phases are to be doubted too."
        )

    def test_the_summary_counts_what_is_beyond_noise(self) -> None:
        def summary(bf16: float) -> str:
            def times(point: Point) -> dict[str, float]:
                factor = bf16 if point.parameters["precision"] == "bf16" else 1.0
                return {phase: ms / factor for phase, ms in STEP.items()}

            return findings.summary(collected_of(times), data_of(times))

        assert "makes 4 of 4 steps faster beyond noise (up to 2.00×) and none slower." in summary(2)
        assert "0 of 4 steps faster beyond noise and 4 slower (down to 0.500×)." in summary(0.5)

    def test_a_missing_arm_is_said(self) -> None:
        data = data_of(lambda p: STEP if p.parameters["precision"] == "fp32" else None)
        told = speedup_findings(data, "bf16")
        assert "no step was measured in both" in told["pays_bf16"]
        assert all("no place was measured" in told[k] for k in told if k.startswith("speedup_"))
        assert "bf16 could not be compared with fp32" in findings.summary(
            collected_of(lambda p: STEP if p.parameters["precision"] == "fp32" else None), data
        )


def swapped_precisions(point: Point, device: str) -> Result:
    """The point's result, made of the other precision's times."""
    other = {"fp32": "bf16", "bf16": "fp32"}[str(point.parameters["precision"])]
    twin = replace(point, parameters={**point.parameters, "precision": other})
    return replace(synthetic.end_to_end(twin, device), parameters=point.parameters)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_swapping_two_precisions_turns_every_comparing_sentence_round(device: str) -> None:
    straight = findings.findings(synthetic.collected("end_to_end", device))
    swapped = findings.findings(synthetic.collected("end_to_end", device, swapped_precisions))
    comparing = [name for name in straight if name.startswith(("speedup_", "pays_"))]
    assert len(comparing) == 6
    for name in comparing:
        assert _count("faster", straight[name]) == _count("slower", swapped[name]), name
        assert _count("slower", straight[name]) == _count("faster", swapped[name]), name
        if "within noise at every place" not in straight[name]:
            assert straight[name] != swapped[name], name
    assert straight["summary"] != swapped["summary"]


def _count(word: str, text: str) -> int:
    """How many places a sentence calls faster or slower."""
    found = re.search(rf"is {word} at (?:all )?(\d+)", text)
    return int(found[1]) if found else 0


def test_every_finding_is_a_sentence_even_without_any_result() -> None:
    told = findings.findings(collected_of(nothing))
    assert all(text.endswith(".") and "nan" not in text for text in told.values())
