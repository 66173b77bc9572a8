"""The model as a whole: one model, two ways to run it, the same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lmlab.chapters.attention.measure.switch import Switch, check_loss
from torch import Tensor, nn

from lmlab.chapters.attention.measure import measure, model_compile
from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.measure.statistics import Measurement
from tests.chapters.attention.points import model_point

WRONG = "tests.chapters.attention.variants:upside_down"
TOO_LARGE = "tests.chapters.attention.variants:too_large"


class OwnModel(nn.Module):
    """A user's model, whose attention cannot be exchanged."""

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


def test_train_steps_of_both_attentions_are_timed_in_turns(cpu: torch.device) -> None:
    outcome = measure(model_point("model", "naive", "tiled", "flash"), cpu)
    assert list(outcome.measurements) == ["naive.train_step", "tiled.train_step", "total"]
    arms = outcome.data["arms"]
    assert arms["tiled"]["loss"] == pytest.approx(arms["naive"]["loss"], rel=1e-5)
    assert arms["flash"]["status"] == "unsupported"


def test_an_attention_with_another_loss_gets_no_time(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.chapters.attention import variants

    monkeypatch.setattr(variants, "upside_down", lambda q, k, v, *, is_causal: 0 * v)
    outcome = measure(model_point("model", "naive", WRONG), cpu)
    assert outcome.data["arms"][WRONG]["status"] == "failed"
    assert "by the first arm" in outcome.data["arms"][WRONG]["reason"]
    assert list(outcome.measurements) == ["naive.train_step", "total"]


def test_where_the_first_attention_does_not_fit_the_next_one_is_measured(
    cpu: torch.device,
) -> None:
    outcome = measure(model_point("model", TOO_LARGE, "tiled"), cpu)
    assert outcome.data["arms"][TOO_LARGE]["status"] == "oom"
    assert list(outcome.measurements) == ["tiled.train_step", "total"]


def test_a_model_of_the_users_own_keeps_its_attention(cpu: torch.device) -> None:
    own = "tests.chapters.attention.test_models:OwnModel"
    outcome = measure(model_point("model", "naive", "tiled", model=own), cpu)
    assert outcome.status == "unsupported"
    assert "the study's own model only" in str(outcome.reason)


def test_the_compiled_model_runs_the_same_steps(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph alone: what inductor makes of it is for a GPU, and for its own tests.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    outcome = measure(model_point("model_compile", num_layers=1), cpu)
    assert list(outcome.measurements) == [
        f"{arm}.{total}"
        for arm in ("eager", "compiled")
        for total in ("forward", "forward_backward", "train_step")
    ]
    arms = outcome.data["arms"]
    assert arms["compiled"]["first_step_s"] > 0
    assert arms["compiled"]["attention_replaced"] == 0
    forward = outcome.measurements["eager.forward"].median_ms
    assert 0 < forward < outcome.measurements["eager.train_step"].median_ms


def test_a_model_that_does_not_compile_leaves_the_eager_times(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> object:
        def call(tokens: Tensor) -> Tensor:
            raise MemoryError("no room")

        return call

    monkeypatch.setattr(torch, "compile", breaks)
    outcome = measure(model_point("model_compile", num_layers=1), cpu)
    assert outcome.data["arms"]["compiled"]["status"] == "oom"
    assert list(outcome.measurements) == [
        "eager.forward",
        "eager.forward_backward",
        "eager.train_step",
    ]


def test_sums_are_taken_step_by_step() -> None:
    parts = [
        Measurement(samples_ms=samples, clock="host", cache="warm", stopped="2 samples")
        for samples in ((1.0, 20.0), (10.0, 2.0))
    ]
    assert model_compile.summed(parts).samples_ms == (11.0, 22.0)


def test_a_switch_has_each_parameter_once() -> None:
    model = nn.Linear(2, 3)
    switch = Switch(model, {"plain": model, "twice": lambda x: 2 * model(x)})
    assert len(list(switch.parameters())) == 2
    x = torch.ones(1, 2)
    plain = switch(x)
    switch.choose("twice")
    assert torch.equal(switch(x), 2 * plain)


@pytest.mark.parametrize(
    ("loss", "fits"), [(1.0, True), (1.00005, True), (1.01, False), (float("nan"), False)]
)
def test_losses_agree_within_the_precision(loss: float, fits: bool) -> None:
    if fits:
        check_loss(loss, 1.0, "fp32")
    else:
        with pytest.raises(WrongNumbers):
            check_loss(loss, 1.0, "fp32")
