"""Median, quartiles, deviation, noise and stability of a list of samples."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lmlab.measure import records
from lmlab.measure.statistics import Measurement, drift, median_error, stability, summarize


@given(samples=st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60))
def test_statistics_agree_with_numpy_and_the_standard_library(samples: list[float]) -> None:
    summary = summarize(samples)
    expected = np.quantile(samples, [0, 0.25, 0.5, 0.75, 1])
    found = [summary.min, summary.q1, summary.median, summary.q3, summary.max]
    assert found == pytest.approx(expected.tolist(), rel=1e-9)
    assert (summary.n, summary.mean) == (len(samples), pytest.approx(statistics.mean(samples)))
    if len(samples) == 1:
        assert (summary.sd, summary.noisy) == (None, False)
    else:
        assert summary.sd == pytest.approx(statistics.stdev(samples), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("half_width", "noisy"), [(0.09, False), (0.11, True)])
def test_noisy_means_quartiles_a_tenth_apart(half_width: float, noisy: bool) -> None:
    # Of five evenly spread samples the quartiles are the second and the fourth.
    samples = [1 - half_width, 1 - half_width / 2, 1.0, 1 + half_width / 2, 1 + half_width]
    assert summarize(samples).noisy is noisy


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_say_nothing_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^samples must [^\n]+$"):
        summarize(samples)


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=200))
def test_the_error_of_the_median_covers_95_percent(samples: list[float]) -> None:
    n, error = len(samples), median_error(samples)
    outside = int(stats.binom.ppf(0.025, n, 0.5))  # P(fewer than this) <= 2.5 %
    if outside == 0:
        assert error == math.inf
        return
    ordered = sorted(samples)
    width = ordered[-outside] - ordered[outside - 1]
    assert error == pytest.approx(width / 2 / statistics.median(samples))


NOISE = np.random.default_rng(0).normal(0, 0.01, 40)
SHAPES = {
    "steady": (10 * (1 + NOISE), "steady"),
    "noisy": (10 * (1 + 8 * NOISE), "steady"),
    "constant": (np.full(40, 10.0), "steady"),
    "one outlier": (np.append(10 * (1 + NOISE), 99.0), "steady"),
    "rising": (10 * (1 + NOISE + np.linspace(0, 0.1, 40)), "drifting"),
    "falling": (10 * (1 + NOISE - np.linspace(0, 0.1, 40)), "drifting"),
    "wandering": (10 * (1 + NOISE + 0.1 * (np.arange(40) // 13 == 1)), "drifting"),
    "a drift too small to matter": (10 * (1 + NOISE / 10 + np.linspace(0, 0.02, 40)), "steady"),
    "two groups": (10 * (1 + NOISE + 0.2 * (np.arange(40) % 3 == 0)), "bimodal"),
    "two groups too close": (10 * (1 + NOISE / 10 + 0.04 * (np.arange(40) % 2)), "steady"),
    "too few to judge": (np.array([10.0, 20.0] * 4), "steady"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_that_drift_or_have_two_modes_are_recognized(shape: str) -> None:
    samples, expected = SHAPES[shape]
    assert stability(samples.tolist()) == expected
    assert stability((samples * 1e-3).tolist()) == expected, "whatever the unit"


@given(st.lists(st.floats(1, 100), min_size=10, max_size=40))
def test_drift_is_how_far_the_thirds_lie_apart(samples: list[float]) -> None:
    found, sizes = drift(samples), (max(samples), min(samples))
    assert found is not None
    assert 0 <= found <= sizes[0] / sizes[1] - 1
    assert drift(samples[::-1]) == pytest.approx(found)
    assert drift(samples[:9]) is None


def test_a_record_has_the_samples_their_statistics_and_the_labels() -> None:
    taken = Measurement(samples_ms=(3.0, 1.0, 2.0), clock="wall", cache="warm", stopped="3 samples")
    assert json.loads(json.dumps(records.timed(taken, phase="forward"))) == {
        **{"quantity": "time", "labels": {"phase": "forward"}, "status": "ok", "reason": None},
        **{"unit": "ms", "value": 2.0, "clock": "wall", "cache": "warm", "stopped": "3 samples"},
        **{"samples": [3.0, 1.0, 2.0], "n": 3, "q1": 1.5, "q3": 2.5, "min": 1.0, "max": 3.0},
        **{"mean": 2.0, "sd": 1.0, "noisy": True, "drift": None, "stability": "steady"},
    }
