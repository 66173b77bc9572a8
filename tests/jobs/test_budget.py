"""The time budget of a study, and the time limit of a point."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lmlab.jobs import budget


@pytest.fixture(autouse=True)
def _no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(budget.VARIABLE, "")
    monkeypatch.delenv(budget.VARIABLE)


def test_a_point_is_skipped_from_the_deadline_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget.why_skipped() is None
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    budget.start(240)
    budget.start(9)  # a budget that is running is not replaced
    monkeypatch.setattr(time, "time", lambda: 1240.0)
    assert budget.why_skipped() is None
    monkeypatch.setattr(time, "time", lambda: 1240.1)
    assert budget.why_skipped() == "skipped: the study's time budget of 240 s was used up"


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ('{"reason": "skipped: the study\'s time budget of 5 s was used up"}', True),
        ('{"reason": "needs 4 GPUs"}', False),
        ('{"reason": null}', False),
        ("[]", False),
        ("{", False),
    ],
)
def test_a_skipped_result_is_recognised(tmp_path: Path, text: str, skipped: bool) -> None:
    path = tmp_path / "result.json"
    assert not budget.was_skipped(path)
    path.write_text(text)
    assert budget.was_skipped(path) is skipped


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_limits_nothing_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(budget.LIMIT, text)
    with pytest.raises(ValueError, match=f"^{budget.LIMIT} = '{text}'; allowed: "):
        budget.limit_s()
