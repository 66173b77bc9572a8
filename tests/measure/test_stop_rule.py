"""When sampling stops, and the reason that is recorded."""

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


@pytest.mark.parametrize(
    ("samples_ms", "elapsed_s", "reason"),
    [
        pytest.param([20.0] * 9, 0.2, None, id="settled, too few samples"),
        pytest.param([20.0] * 10, 0.2, "relative deviation 0.00% after 10 samples", id="settled"),
        pytest.param([1.0] * 99, 4.0, None, id="settled, too little time"),
        pytest.param([20.0, 30.0] * 20, 4.9, None, id="noisy"),
        pytest.param([20.0, 30.0] * 20, 5.0, "time cap of 5 s after 40 samples", id="time cap"),
        pytest.param([], 99.0, None, id="always one sample"),
        pytest.param([9000.0], 99.0, "time cap of 5 s after 1 sample", id="one slow sample"),
        pytest.param([0.01, 0.02] * 500, 0.1, "sample cap of 1000", id="sample cap"),
    ],
)
def test_when_and_why_sampling_stops(
    samples_ms: list[float], elapsed_s: float, reason: str | None
) -> None:
    assert fed(rule(), *samples_ms).reason(elapsed_s) == reason


@given(st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=50))
def test_the_running_deviation_is_the_sample_deviation_over_the_mean(samples: list[float]) -> None:
    expected = statistics.stdev(samples) / statistics.fmean(samples)
    assert fed(rule(), *samples).relative_deviation == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "changes", [{"min_samples": 0}, {"max_samples": 9}, {"time_cap_s": 0.0}], ids=str
)
def test_an_impossible_rule_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(changes))} must be"):
        rule(**changes)
