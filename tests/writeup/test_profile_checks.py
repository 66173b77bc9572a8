"""The profile chapter's checks: silent when all fits, one line for each thing that does not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.checks.profile import checks
from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.profile_consistency import consistency
from tests.writeup import factory, synthetic
from tests.writeup.small_profile import SIMT, collected, nothing, recording
from tests.writeup.synthetic_profile import corners


def changed(change: Callable[[dict[str, Any]], None], **how: Any) -> Collected:
    """One point whose data a test spoils."""

    def make(point: Point) -> Result:
        result = recording(point, **how)
        data = deepcopy(dict(result.data))
        change(data)
        return factory.result(point, measurements=result.measurements, data=data)

    return collected(make, sizes=["small"], contexts=[128])


def test_a_sound_study_has_no_warning() -> None:
    assert checks(collected()) == []
    assert checks(collected(nothing)) == []


def test_the_synthetic_studies_have_no_warning() -> None:
    for device in ("cuda", "cpu"):
        assert checks(synthetic.collected("profile", device, corners)) == []


def test_kernels_outside_all_phases_are_missed() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["forward"]["phases"][0].update(total_ns=9_000_000, busy_ns=9_000_000)

    (warning,) = checks(changed(spoil))
    assert warning == (
        "The kernels of the phases of forward of small at context 128 add up to 9.00 ms of 10.0 ms "
        "of GPU time."
    )


def test_a_phase_busier_than_its_kernels_is_impossible() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["forward"]["phases"][0]["busy_ns"] = 11_000_000

    (warning,) = checks(changed(spoil))
    assert "is busy for 11.0 ms, longer than its kernels take (10.0 ms)" in warning


def test_a_table_that_lost_rows_is_found() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["train_step"]["table"]["total_ns"][0] -= 4_000_000

    (warning,) = checks(changed(spoil))
    assert warning.startswith(
        "The kernel table of train step of small at context 128 adds up to 30"
    )


def test_copies_complete_the_table() -> None:
    def move(data: dict[str, Any]) -> None:
        run = data["modes"]["train_step"]
        run["table"]["total_ns"][0] -= 4_000_000
        run["copies"]["total_ns"] = 4_000_000

    assert checks(changed(move)) == []


def test_backward_must_take_one_and_a_half_to_three_times_forward() -> None:
    for ms in (14.0, 31.0):
        (warning,) = checks(changed(lambda data: None, backward=[(SIMT, ms, 170)]))
        assert warning.startswith("GPU time of backward should be 1.5 to 3 times that of forward")
    assert checks(changed(lambda data: None, backward=[(SIMT, 29.0, 170)])) == []


def test_a_cpu_is_not_held_to_that_ratio() -> None:
    def make(point: Point) -> Result:
        return recording(point, "cpu", backward=[(SIMT, 1.0, 3)])

    assert checks(collected(make, "cpu", sizes=["cpu-small"])) == []


def test_a_forward_table_printed_twice_has_lost_backward() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["forward_backward"] = data["modes"]["forward"]

    assert any("the kernels of backward are missing" in text for text in checks(changed(spoil)))


def test_a_gpu_busier_than_the_clock_is_impossible() -> None:
    (warning,) = checks(changed(lambda data: None, clock_ms=5.0))
    assert "busy for 200 % of the clock's forward pass of small at context 128" in warning


def test_a_part_above_the_peak_is_impossible() -> None:
    card = factory.result(Point("machine"), data={"peaks": {"tflops": {"fp32": 1.0}}})
    warnings = checks(collected(card=card, sizes=["small"], contexts=[128]))
    assert len(warnings) == 2
    assert (
        "scores QKᵀ of small at context 128 runs at 4.00 TFLOP/s, above the stated" in warnings[0]
    )


def test_what_was_checked_stands_on_the_page() -> None:
    assert consistency(collected()) == (
        "In all 12 runs the kernels of the phases add up to the device's time within 0.1 %. "
        "Kernels of backward take 1.90 times as long as those of forward; 1.5 to 3 times is what "
        "twice the arithmetic lets one expect. In all 4 points the kernel table of forward differs "
        "from that of forward and backward: each run has its own."
    )
    assert consistency(collected(nothing)) == (
        "Nothing was recorded, so nothing can contradict itself."
    )


def test_what_does_not_fit_stands_there_too() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["forward"]["phases"][0].update(total_ns=9_000_000, busy_ns=9_000_000)

    text = consistency(changed(spoil, backward=[(SIMT, 31.0, 170)]))
    assert "in 2 of 3 runs only" in text
    assert "3.10 times as long as those of forward, for 1 point outside the 1.5 to 3" in text


def test_lost_kernels_of_backward_stand_there_too() -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["modes"]["forward_backward"] = data["modes"]["forward"]

    assert "In 0 of 1 point only the kernel table" in consistency(changed(spoil))


def test_of_a_cpu_no_ratio_is_expected() -> None:
    def make(point: Point) -> Result:
        return recording(point, "cpu", backward=[(SIMT, 1.0, 3)])

    text = consistency(collected(make, "cpu", sizes=["cpu-small"]))
    assert "0.100 times as long as those of forward." in text
