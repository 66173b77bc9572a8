"""An outcome is numbers, or one line that says why there are none."""

from __future__ import annotations

import pytest

from lmlab.jobs.outcome import Outcome, without_numbers
from lmlab.measure import records
from lmlab.measure.records import Record
from lmlab.measure.statistics import Measurement


def timed(phase: str, *samples: float) -> Record:
    measured = Measurement(samples_ms=samples, clock="wall", cache="warm", stopped="test")
    return records.timed(measured, phase=phase)


QUIET, NOISY = (10.0, 10.1, 10.2), (5.0, 10.0, 20.0)


@pytest.mark.parametrize(
    ("measurements", "noisy"),
    [
        pytest.param([timed("total", *QUIET)], False, id="quiet total"),
        pytest.param([timed("total", *NOISY)], True, id="noisy total"),
        pytest.param(
            [timed("zero_grad", *NOISY), timed("total", *QUIET)], False, id="noise in a small phase"
        ),
        pytest.param([timed("a", *QUIET), timed("b", *NOISY)], True, id="no total, one noisy"),
        pytest.param([], False, id="nothing timed"),
    ],
)
def test_noise_is_judged_by_the_total(measurements: list[Record], noisy: bool) -> None:
    assert Outcome(measurements=measurements).noisy is noisy


def test_a_reason_is_one_line_of_bounded_length() -> None:
    outcome = without_numbers("failed", "first\n  second\n" + "x" * 1000)
    assert outcome.reason is not None
    assert outcome.reason.startswith("first second xxx")
    assert len(outcome.reason) == 300
