"""Numbers of the attention chapter that contradict each other are found."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.checks.attention import checks
from tests.writeup import factory, synthetic
from tests.writeup.small_attention import Change, collected, noted, nothing, scaled, study


@pytest.fixture(params=["cuda", "cpu"])
def sound(request: pytest.FixtureRequest) -> list[str]:
    found = checks(synthetic.collected("attention", request.param))
    return [text for text in found if "published shape" not in text]


def test_sound_results_raise_no_warning(sound: list[str]) -> None:
    assert sound == []


def test_nothing_measured_is_no_contradiction() -> None:
    assert checks(collected(nothing)) == []


WRONG: dict[str, tuple[Change, str]] = {
    "memory that the formula does not explain": (
        noted("naive", peak_memory_bytes=2**40),
        "In 7 of 19 cases naive attention holds another amount of memory than the formula says",
    ),
    "a forward and backward shorter than its parts": (
        scaled({"sdpa_math.both": 0.5}, topic="benchmark", sequence=4096),
        "In 1 of 24 cases forward and backward take another time together than one by",
    ),
    "a rate above the peak": (
        scaled({"flash": 0.1}, topic="leaderboard"),
        "TFLOP/s is above the stated peak of 989",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_contradiction_is_told(change: Change, words: str) -> None:
    assert any(words in text for text in checks(collected(change))), checks(collected(change))


def test_the_same_kernels_in_two_topics() -> None:
    what = study(leaderboard={"head_dims": [128]})
    slow = scaled({"chosen": 1.5}, topic="tiles")
    warnings = checks(collected(slow, what))
    assert any("among the tiles" in text and "apart" in text for text in warnings)
    assert not any("among the tiles" in text for text in checks(collected(what=what)))


def test_a_noisy_time_contradicts_nothing() -> None:
    def noisy(point: Point, values: dict[str, Any]) -> None:
        if "sdpa_math.both" in values["measurements"]:
            samples = [0.01, 0.5, 1.0, 0.01, 0.7]
            values["measurements"]["sdpa_math.both"] = factory.measurement(samples)

    assert not any("one by one" in text for text in checks(collected(noisy)))
