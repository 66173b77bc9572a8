"""Median, quartiles, deviation and the noise label of a list of samples."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.statistics import Measurement, summarise

TIMES = st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60)


@given(samples=TIMES)
def test_order_statistics_agree_with_numpy(samples: list[float]) -> None:
    summary = summarise(samples)
    expected = np.quantile(samples, [0, 0.25, 0.5, 0.75, 1])
    found = [summary.minimum, summary.q1, summary.median, summary.q3, summary.maximum]
    assert found == pytest.approx(expected.tolist(), rel=1e-9)


@given(samples=st.lists(st.floats(1e-3, 1e5), min_size=2, max_size=60))
def test_quartiles_mean_and_deviation_agree_with_the_standard_library(samples: list[float]) -> None:
    summary = summarise(samples)
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    assert (summary.q1, summary.q3) == pytest.approx((q1, q3), rel=1e-9)
    assert summary.mean == pytest.approx(statistics.mean(samples), rel=1e-9)
    assert summary.sd == pytest.approx(statistics.stdev(samples), rel=1e-9, abs=1e-12)


@given(samples=TIMES)
def test_the_order_of_samples_does_not_matter(samples: list[float]) -> None:
    assert summarise(samples) == summarise(sorted(samples))


def test_quartiles_interpolate_between_neighbours() -> None:
    summary = summarise([1.0, 2.0, 3.0, 4.0])
    assert (summary.q1, summary.median, summary.q3) == (1.75, 2.5, 3.25)


def test_one_sample_has_no_deviation_and_is_its_own_quartiles() -> None:
    summary = summarise([7.0])
    assert (summary.n, summary.q1, summary.median, summary.q3) == (1, 7.0, 7.0, 7.0)
    assert summary.sd is None
    assert not summary.noisy


@pytest.mark.parametrize(
    ("half_width", "noisy"),
    [pytest.param(0.09, False, id="iqr-9-percent"), pytest.param(0.11, True, id="iqr-11-percent")],
)
def test_noisy_means_an_interquartile_range_above_a_tenth_of_the_median(
    half_width: float, noisy: bool
) -> None:
    # Of five evenly spread samples the quartiles are the second and the fourth.
    samples = [1 - half_width, 1 - half_width / 2, 1.0, 1 + half_width / 2, 1 + half_width]
    assert summarise(samples).noisy is noisy


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_say_nothing_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^samples: [^\n]+$"):
        summarise(samples)


def test_a_measurement_as_json_keeps_its_samples_and_names_its_units() -> None:
    measurement = Measurement(
        samples_ms=(3.0, 1.0, 2.0), clock="host", cache="warm", stopped="3 samples"
    )
    assert json.loads(json.dumps(measurement.to_json())) == {
        "clock": "host",
        "cache": "warm",
        "stopped": "3 samples",
        "samples_ms": [3.0, 1.0, 2.0],
        "n": 3,
        "median_ms": 2.0,
        "q1_ms": 1.5,
        "q3_ms": 2.5,
        "min_ms": 1.0,
        "max_ms": 3.0,
        "mean_ms": 2.0,
        "sd_ms": 1.0,
        "noisy": True,
    }
