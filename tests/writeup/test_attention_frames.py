"""Arms as rows: every arm that was asked for, measured or not, and comparisons within a process."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from lmlab.study.points import Point
from lmlab.writeup.comparison import ACROSS_POINTS
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import beside, fastest, losses, wins_from
from tests.writeup.small_attention import collected, nothing, scaled, without


def data(*args: object) -> pd.DataFrame:
    return frames.frame(collected(*args))  # type: ignore[arg-type]


def test_every_arm_has_a_row_a_pass_even_if_nothing_was_measured() -> None:
    rows = data(nothing)
    assert set(rows["status"]) == {"missing"}
    assert set(frames.of(rows, topic="model_compile")["arm"]) == {"eager", "compiled"}
    assert set(frames.of(rows, topic="tiles")["arm"]) == {"64x64", "64x128", "256x64", "256x128"}
    assert set(frames.of(rows, topic="model")["pass"]) == {"train_step"}
    assert not len(frames.measured(rows))


def test_an_arm_has_its_own_status() -> None:
    rows = data(without({"flex": ("failed", "it broke")}))
    flex = frames.of(rows, topic="benchmark", arm="flex")
    assert set(flex["status"]) == {"failed"}
    assert set(flex["reason"]) == {"it broke"}
    assert set(frames.of(rows, topic="benchmark", arm="naive")["status"]) == {"ok"}


def test_a_pass_that_was_timed_counts_although_its_arm_broke_later() -> None:
    def breaks(point: object, values: dict[str, Any]) -> None:
        if "flex.both" in values["measurements"]:
            del values["measurements"]["flex.both"]
            values["data"]["arms"]["flex"].update(status="oom", reason="full")

    rows = frames.of(data(breaks), topic="benchmark", arm="flex", sequence=128)
    assert dict(zip(rows["pass"], rows["status"], strict=True)) == {
        "forward": "ok",
        "backward": "ok",
        "both": "oom",
    }


def test_sequences_stay_whole_numbers() -> None:
    assert {type(value) for value in frames.order(data(), "sequence")} == {int}


def test_rates_count_the_unmasked_half() -> None:
    row = frames.of(data(), topic="benchmark", arm="flash", sequence=4096, pass_="forward").iloc[0]
    assert row["tflops"] == pytest.approx(2 * 4096**2 * 64 / row["median_ms"] / 1e9)


def test_arms_are_named_in_one_order_and_a_users_own_last() -> None:
    rows = pd.DataFrame({"arm": ["mine:f", "flash", "naive", "sdpa_math"]})
    assert frames.arms_of(rows) == ["naive", "sdpa_math", "flash", "mine:f"]
    assert frames.label("mine:f") == "mine:f"


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "faster"), (2.0, "slower"), (1.001, "same")])
def test_a_comparison_allows_for_doubt(factor: float, verdict: str) -> None:
    rows = frames.of(data(), topic="benchmark", arm={"naive"})
    copy = rows.assign(arm="copy")
    for column in ("median_ms", "q1_ms", "q3_ms"):
        copy[column] *= factor
    ratios = frames.against(pd.concat([rows, copy]), "copy", "naive")
    assert set(ratios["verdict"]) == {verdict}
    assert ratios["speedup"].iloc[0] == pytest.approx(1 / factor)


@pytest.mark.parametrize(("factor", "verdict"), [(0.985, "same"), (0.97, "faster")])
def test_many_samples_however_narrow_must_be_apart_by_a_floor(factor: float, verdict: str) -> None:
    rows = frames.of(data(), topic="benchmark", arm={"naive"})
    narrow = rows.assign(**dict.fromkeys(("q1_ms", "q3_ms"), rows["median_ms"]))
    copy = narrow.assign(arm="copy")
    for column in ("median_ms", "q1_ms", "q3_ms"):
        copy[column] *= factor
    assert set(frames.against(pd.concat([narrow, copy]), "copy", "naive")["verdict"]) == {verdict}
    assert frames.LEAST_APART == ACROSS_POINTS, "the page has one limit"


@pytest.mark.parametrize(("factor", "verdict"), [(0.97, "same"), (0.9, "faster"), (1.1, "slower")])
def test_a_single_sample_must_be_further_apart(factor: float, verdict: str) -> None:
    rows = frames.of(data(), topic="benchmark", arm={"naive"})
    middle = rows["median_ms"]
    once = rows.assign(arm="once", n=1, **dict.fromkeys(("q1_ms", "q3_ms"), middle * factor))
    once["median_ms"] = middle * factor
    assert set(frames.against(pd.concat([rows, once]), "once", "naive")["verdict"]) == {verdict}


def test_a_comparison_of_nothing_is_empty() -> None:
    assert not len(frames.against(data(nothing), "flash", "naive"))


def test_the_power_of_a_curve() -> None:
    assert frames.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_long_shapes_or_all_of_them() -> None:
    rows = data()
    assert set(frames.long_ones(frames.of(rows, topic="naive"))["sequence"]) == {4096, 8192, 65536}
    assert set(frames.long_ones(frames.of(rows, topic="benchmark"))["sequence"]) == {128, 4096}


def test_who_is_fastest_and_from_where_on() -> None:
    race = frames.of(data(), topic="benchmark", pass_="both")
    assert set(fastest(race)["arm"]) == {"flash"}
    assert "flash" not in set(fastest(race, without=["flash"])["arm"])
    assert wins_from(frames.against(race, "flash", "naive")) == 128
    assert wins_from(frames.against(race, "naive", "flash")) is None
    assert set(beside(race, "flash")["other"]) == set(race["arm"]) - {"flash"}
    assert not len(beside(frames.of(race, arm="flash"), "flash"))
    assert not len(fastest(frames.of(data(nothing), topic="benchmark")))


def test_losses_are_those_beyond_noise() -> None:
    slow = frames.of(
        data(scaled({"flash.both": 9.0}, topic="benchmark", sequence=128)), topic="benchmark"
    )
    lost = losses(slow, "flash", ["naive", "sdpa_flash"])
    assert set(zip(lost["other"], lost["sequence"], lost["pass"], strict=True)) == {
        ("naive", 128, "both"),
        ("sdpa_flash", 128, "both"),
    }
    assert not len(losses(slow, "flash", []))


def test_the_two_longest_sequences_of_each_head_dim() -> None:
    rows = frames.of(data(), topic="naive", arm="naive", pass_="forward")
    measured = frames.measured(rows)
    last = frames.last_two(measured, frames.order(rows, "sequence"))
    assert set(last["sequence"]) == {4096, 8192}
    assert len(last) == 4
    with_a_gap = measured[(measured["head_dim"] != 16) | (measured["sequence"] != 4096)]
    last = frames.last_two(with_a_gap, frames.order(rows, "sequence"))
    assert set(last["head_dim"]) == {64}


def test_points_without_a_result_are_counted_and_can_be_left_out() -> None:
    def some(point: Point, values: object) -> bool | None:
        return False if point.parameters.get("sequence") == 1024 else None

    rows = frames.of(data(some), topic="naive")
    assert frames.points(rows) == 7
    assert set(frames.known(rows)["sequence"]) == {4096, 8192, 65536}, "OOM is a result"
    assert frames.not_there(rows) == "2 of 7 shapes are not measured"
    assert frames.not_there(frames.of(data(), topic="naive")) == ""
    none = frames.of(data(nothing), topic="naive")
    assert len(frames.known(none)) == len(none), "all where there is none"


def test_missing_numbers_are_not_zero() -> None:
    row = frames.of(data(nothing), topic="naive").iloc[0]
    assert math.isnan(row["median_ms"])
    assert row["saved_bytes"] is None
