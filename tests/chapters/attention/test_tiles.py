"""Every tile shape of our kernels gives the same numbers; here through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.chapters.attention.measure import tiles as topic
from lmlab.chapters.attention.measure.problem import shape_of
from lmlab.chapters.attention.measure.reference import check
from lmlab.jobs.outcome import Unsupported
from lmlab.kernels.configs import Direction
from tests.chapters.attention.points import tiles_point

SHAPE = {
    "batch": 1,
    "heads": 2,
    "sequence": 64,
    "head_dim": 16,
    "precision": "fp32",
    "causal": True,
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cut_is_launched_checked_and_counted(cpu: torch.device, direction: Direction) -> None:
    run = topic.Run(shape_of(SHAPE), direction, cpu, seed=0)
    cut = topic.cut(32, 16, {"stages": 2, "direction": direction})
    found = run.errors(cut)
    assert set(found) == ({"output"} if direction == "forward" else {"grad_q", "grad_k", "grad_v"})
    check(found, torch.float32)
    assert run.by_count(cut)["shared_by_count_bytes"] > 0
    assert run.try_out(cut) == {"shared_bytes": None, "registers": None, "spills": None}
    assert callable(run.prepare(cut)())
    assert run.chosen().block_m >= 16


def test_tiles_that_the_gpu_cannot_hold_are_named_with_the_reason(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise topic.launch.TilesTooLarge("tiles 32 x 16: out of resource: shared memory")

    monkeypatch.setattr(topic.launch, "launch_fitting", too_large)
    run = topic.Run.__new__(topic.Run)
    run._problem, run._direction = None, "forward"  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="out of resource: shared memory"):
        run.try_out(topic.cut(32, 16, {"stages": 2, "direction": "forward"}))


def test_the_whole_race_runs_where_flash_is_not_refused(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic, "refuse_unsupported", lambda *_: None)
    outcome = topic.measure(tiles_point(), cpu)
    arms: dict[str, dict[str, Any]] = outcome.data["arms"]
    assert list(arms) == ["32x32", "16x32", "chosen"]
    assert {row["status"] for row in arms.values()} == {"ok"}
    assert list(outcome.measurements) == ["32x32.forward", "16x32.forward", "chosen.forward"]
    assert arms["16x32"]["warps"] == 4
    assert arms["16x32"]["errors"]["output"] < 1e-5
    assert outcome.data["shared_limit_bytes"] > 0


def test_a_cut_with_wrong_numbers_says_by_how_much_and_is_not_timed(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic, "refuse_unsupported", lambda *_: None)
    off = {"32x32": 0.25}
    monkeypatch.setattr(
        topic.Run,
        "errors",
        lambda _, tiles: {"output": off.get(f"{tiles.block_m}x{tiles.block_n}", 0)},
    )
    outcome = topic.measure(tiles_point(), cpu)
    assert outcome.data["arms"]["32x32"]["status"] == "failed"
    assert outcome.data["arms"]["32x32"]["errors"] == {"output": 0.25}
    assert "32x32.forward" not in outcome.measurements


def test_another_attention_has_no_tiles(cpu: torch.device) -> None:
    with pytest.raises(Unsupported, match="attention = 'naive' has no tiles; allowed: flash"):
        topic.measure(tiles_point(attention="naive"), cpu)
