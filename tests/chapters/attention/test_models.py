"""Whole models: one set of parameters, several ways to run it, the same numbers."""

from functools import partial

import pytest
import torch
from torch import Tensor

from lmlab.chapters.attention.measure import measure
from tests.chapters.attention import points
from tests.chapters.attention.points import TOO_LARGE, WRONG, model_point
from tests.chapters.attention.test_topics import status, timed
from tests.chapters.pages import found, value_of
from tests.chapters.test_end_to_end import WATCHING

PHASES = ("forward", "backward", "forward_backward", "train_step")


def test_attentions_share_a_model_and_have_one_loss(cpu: torch.device) -> None:
    outcome = measure(model_point("model", "naive", "tiled", "flash", TOO_LARGE), cpu)
    assert timed(outcome) == [(name, p) for name in ("naive", "tiled") for p in PHASES]
    losses = [value_of(outcome, "loss", variant=name) for name in ("naive", "tiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert [status(outcome, name) for name in ("flash", TOO_LARGE)] == ["unsupported", "oom"]
    assert value_of(outcome, "tokens") == 2 * 8


def test_only_fitting_equals_are_timed(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "last_rows_zero", lambda q, k, v, *, is_causal: 0 * v)
    outcome = measure(model_point("model", TOO_LARGE, "tiled", WRONG), cpu)
    assert [status(outcome, name) for name in (TOO_LARGE, WRONG)] == ["oom", "failed"]
    assert timed(outcome) == [("tiled", phase) for phase in PHASES]


def test_attention_of_a_users_model_cannot_be_exchanged(cpu: torch.device) -> None:
    outcome = measure(model_point("model", "naive", "tiled", model=WATCHING), cpu)
    assert outcome.status == "unsupported"


def test_eager_and_compiled_agree(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # The graph alone: inductor's code is for a GPU, and for its own tests.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    outcome = measure(model_point("model_compile", num_layers=1), cpu)
    assert timed(outcome) == [(name, p) for name in ("eager", "compiled") for p in PHASES]
    assert value_of(outcome, "first_step_time", variant="compiled") > 0
    assert value_of(outcome, "attention_replaced", variant="compiled") == 0
    samples = [found(outcome, "time", variant="eager", phase=p)[0]["samples"] for p in PHASES]
    for forward, backward, both, step in zip(*samples, strict=True):
        assert forward + backward == pytest.approx(both)
        assert both < step


def test_failed_compiling_costs_itself(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(tokens: Tensor) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: breaks)
    outcome = measure(model_point("model_compile", num_layers=1), cpu)
    assert (status(outcome, "compiled"), timed(outcome)) == ("oom", [("eager", p) for p in PHASES])
