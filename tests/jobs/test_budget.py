"""The time budget of a study, and the time limit of a point."""

import json
import os
import time
from pathlib import Path

import pytest

from lmlab.jobs import budget


@pytest.fixture(autouse=True)
def _no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(budget.VARIABLE, "")
    monkeypatch.delenv(budget.VARIABLE)


def test_points_after_the_deadline_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert budget.why_skipped("memory", tmp_path) is None
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    budget.start(240, {})
    budget.start(9, {})  # a budget that is running is not replaced
    monkeypatch.setattr(time, "time", lambda: 1240.0)
    assert budget.why_skipped("memory", tmp_path) is None
    monkeypatch.setattr(time, "time", lambda: 1240.1)
    assert "240 s" in str(budget.why_skipped("memory", tmp_path))


def test_a_chapter_has_a_budget_of_its_own(tmp_path: Path) -> None:
    """Only what this run has measured counts, whatever lies there from before."""
    out = tmp_path / "memory" / "size~xl" / "context~128.json"
    out.parent.mkdir(parents=True)
    budget.start(1000, {"memory": 30})
    for name, elapsed_s, age_s in (("old", 500, 3600), ("first", 20, -1), ("second", 10, -1)):
        assert budget.why_skipped("memory", out) is None
        path = out.with_name(f"{name}.json")
        path.write_text(json.dumps({"elapsed_s": elapsed_s}))
        os.utime(path, (time.time() - age_s,) * 2)
    out.with_name("broken.json").write_text("{}")
    assert "30 s" in str(budget.why_skipped("memory", out))
    assert budget.why_skipped("profile", out) is None


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_limits_nothing_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(budget.LIMIT, text)
    with pytest.raises(ValueError, match=f"^{budget.LIMIT} = '{text}'; allowed: "):
        budget.limit_s()
