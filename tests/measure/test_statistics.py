"""Median, quartiles, deviation and the noise label of a list of samples."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure import records
from lmlab.measure.statistics import Measurement, summarize

TIMES = st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60)


@given(samples=TIMES)
def test_order_statistics_agree_with_numpy(samples: list[float]) -> None:
    summary = summarize(samples)
    expected = np.quantile(samples, [0, 0.25, 0.5, 0.75, 1])
    found = [summary.minimum, summary.q1, summary.median, summary.q3, summary.maximum]
    assert found == pytest.approx(expected.tolist(), rel=1e-9)


@given(samples=st.lists(st.floats(1e-3, 1e5), min_size=2, max_size=60))
def test_quartiles_mean_and_deviation_agree_with_the_standard_library(samples: list[float]) -> None:
    summary = summarize(samples)
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    assert (summary.q1, summary.q3) == pytest.approx((q1, q3), rel=1e-9)
    assert summary.mean == pytest.approx(statistics.mean(samples), rel=1e-9)
    assert summary.sd == pytest.approx(statistics.stdev(samples), rel=1e-9, abs=1e-12)


@given(samples=TIMES)
def test_the_order_of_samples_does_not_matter(samples: list[float]) -> None:
    assert summarize(samples) == summarize(sorted(samples))


def test_quartiles_interpolate_between_neighbours() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0])
    assert (summary.q1, summary.median, summary.q3) == (1.75, 2.5, 3.25)


def test_one_sample_has_no_deviation_and_is_its_own_quartiles() -> None:
    summary = summarize([7.0])
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
    assert summarize(samples).noisy is noisy


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_say_nothing_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^samples must [^\n]+$"):
        summarize(samples)


def test_a_record_has_the_samples_their_statistics_and_the_labels() -> None:
    measurement = Measurement(
        samples_ms=(3.0, 1.0, 2.0), clock="wall", cache="warm", stopped="3 samples"
    )
    assert json.loads(json.dumps(records.timed(measurement, phase="forward"))) == {
        **{"quantity": "time", "labels": {"phase": "forward"}, "status": "ok", "reason": None},
        **{"unit": "ms", "value": 2.0, "clock": "wall", "cache": "warm", "stopped": "3 samples"},
        **{"samples": [3.0, 1.0, 2.0], "n": 3, "q1": 1.5, "q3": 2.5, "min": 1.0, "max": 3.0},
        **{"mean": 2.0, "sd": 1.0, "noisy": True},
    }


def test_a_record_may_be_a_plain_value_or_a_reason() -> None:
    assert records.value("flops", 7, "FLOP", mode="forward")["value"] == 7
    failed = records.without_value("time", "oom", "no memory", variant="naive")
    assert (failed["value"], failed["status"], failed["reason"]) == (None, "oom", "no memory")
