"""The largest size that fits and keeps its step short, and a reason for each one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.jobs import autosize
from lmlab.jobs.autosize import Choice, choose, why_too_large, why_too_slow
from lmlab.jobs.rank_work import Candidate, candidates, expected_memory
from lmlab.study.points import Point
from tests.measure.one_rank import group_of_one

CPU = torch.device("cpu")
SHAPE = {"d_ff": 64, "num_layers": 2, "num_heads": 2}
POINT = Point(
    "data_parallel",
    {"world_size": 1, "context": 8, "batch": 2, "precision": "fp32", "attention": "naive"},
    {
        "model": "lmlab.model.transformer:TransformerLM",
        "vocab_size": 50,
        "rope_theta": 10000.0,
        "seed": 0,
        "sizes": [
            {"size": name, "d_model": width, **SHAPE}
            for name, width in (("huge", 4096), ("wide", 512), ("slim", 16))
        ],
    },
)


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    with group_of_one(tmp_path):
        yield


def sizes() -> list[Candidate]:
    return candidates(POINT, CPU)


def chosen(monkeypatch: pytest.MonkeyPatch, rate: float, steps_s: dict[str, float]) -> Choice:
    monkeypatch.setattr(autosize, "bandwidth", lambda device: rate)
    asked: dict[str, Any] = {"limit_s": 2.0, "messages": 1}
    return choose(sizes(), CPU, try_step=lambda c: steps_s[c.size], **asked)


def test_the_first_that_is_quick_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(monkeypatch, 1e12, {"huge": 5.0, "wide": 1.5, "slim": 0.1})
    assert choice.candidate.size == "wide"
    records = {(r["quantity"], r["status"]): r for r in choice.records("time")}
    assert records["size", "ok"]["value"] == "wide"
    assert records["size", "unsupported"]["labels"] == {"purpose": "time", "candidate": "huge"}
    assert records["trial_step", "ok"]["value"] == 1500
    assert choice.step_s == 1.5
    assert not choice.over_limit


def test_what_the_link_cannot_carry_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(monkeypatch, 1e6, {"slim": 0.1})
    assert [one.size for one in choice.left_out] == ["huge", "wide"]
    assert choice.candidate.size == "slim"


def test_the_last_is_taken_even_if_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(monkeypatch, 1.0, {"slim": 9.0})
    assert choice.candidate.size == "slim"
    assert choice.over_limit


def test_no_size_that_fits_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosize, "free_bytes", lambda device: 1000.0)
    with pytest.raises(MemoryError, match="no size fits: slim"):
        chosen(monkeypatch, 1e12, {})


def test_ranks_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = sizes()[1]
    expected = expected_memory(wide.workload, CPU)
    assert expected is not None
    free = 1.5 * expected.peak
    monkeypatch.setattr(autosize, "free_bytes", lambda device: free)
    assert why_too_large(wide, CPU) is None
    monkeypatch.setattr(autosize.across_ranks, "ranks_per_device", lambda device: 2)
    reason = why_too_large(wide, CPU)
    assert reason is not None
    assert reason.startswith("2 ranks on one device need")


def test_a_model_of_unknown_size_is_tried() -> None:
    (mine,) = [Candidate(size="mine", workload=_foreign(candidate)) for candidate in sizes()[:1]]
    assert why_too_slow(mine, 1.0, messages=1, limit_s=1e-9) is None
    assert why_too_large(mine, CPU) is None


def _foreign(candidate: Candidate) -> Any:
    return replace(candidate.workload, model="mine.net:Net")
