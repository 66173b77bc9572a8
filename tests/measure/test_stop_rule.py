"""When sampling ends, and what it says about why."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.stop_rule import StopRule


def rule(**changes: Any) -> StopRule:
    settings: dict[str, Any] = {
        "min_samples": 10,
        "min_time_s": 0.1,
        "target_relative_deviation": 0.005,
        "time_cap_s": 5.0,
        "max_samples": 1000,
    }
    return StopRule(**(settings | changes))


def fed(stop: StopRule, *samples_ms: float) -> StopRule:
    for sample in samples_ms:
        stop.add(sample)
    return stop


def test_quiet_samples_stop_once_there_are_enough_of_them() -> None:
    assert fed(rule(), *[20.0] * 9).reason(elapsed_s=0.2) is None
    assert fed(rule(), *[20.0] * 10).reason(0.2) == "relative deviation 0.00% after 10 samples"


def test_quiet_samples_go_on_until_enough_time_was_measured() -> None:
    assert fed(rule(), *[1.0] * 99).reason(elapsed_s=4.0) is None
    assert fed(rule(), *[1.0] * 101).reason(elapsed_s=4.0) is not None


def test_restless_samples_go_on_until_the_time_cap_and_say_so() -> None:
    restless = fed(rule(), *[20.0, 30.0] * 20)
    assert restless.reason(elapsed_s=4.9) is None
    assert restless.reason(elapsed_s=5.0) == "time cap of 5 s after 40 samples"


def test_the_time_cap_waits_for_the_first_sample() -> None:
    assert rule().reason(elapsed_s=99.0) is None
    assert fed(rule(), 9000.0).reason(elapsed_s=99.0) == "time cap of 5 s after 1 sample"


def test_restless_short_samples_end_at_the_sample_cap() -> None:
    assert fed(rule(max_samples=20), *[0.01, 0.02] * 10).reason(0.1) == "sample cap of 20"


@given(st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=50))
def test_the_running_deviation_is_the_sample_deviation_over_the_mean(samples: list[float]) -> None:
    expected = statistics.stdev(samples) / statistics.fmean(samples)
    assert fed(rule(), *samples).relative_deviation == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "changes", [{"min_samples": 0}, {"max_samples": 9}, {"time_cap_s": 0.0}], ids=str
)
def test_a_rule_that_cannot_work_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}: got .*, allowed is"):
        rule(**changes)
