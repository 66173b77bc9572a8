"""Marks on a model's layers and attention are put on from outside and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.attention import naive
from lmlab.measure.trace import annotate
from lmlab.measure.trace.annotate import annotated
from lmlab.measure.trace.ranges import named, recording
from lmlab.model.transformer import TransformerLM

TOKENS = torch.arange(8).reshape(1, 8)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that annotations open and close, in order."""
    log: list[str] = []

    @contextmanager
    def logged(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"/{name}")

    monkeypatch.setattr(annotate, "named", logged)
    monkeypatch.setattr("lmlab.measure.trace.ranges.named", logged)
    return log


@pytest.fixture
def model() -> TransformerLM:
    return TransformerLM(16, 8, 8, 2, 2, 16)


def test_layers_are_named_as_the_model_names_them(model: TransformerLM, opened: list[str]) -> None:
    with annotated(model):
        model(TOKENS)
    layer = ["attention", "/attention"]
    assert opened == ["layers.0", *layer, "/layers.0", "layers.1", *layer, "/layers.1"]


def test_the_parts_of_attention_are_marked_where_they_are_asked_for(
    model: TransformerLM, opened: list[str]
) -> None:
    with annotated(model, attention_in_parts=True), recording():
        model(TOKENS)
    parts = [name for part in ("scores", "softmax", "output") for name in (part, f"/{part}")]
    assert opened[:9] == ["layers.0", "attention", *parts, "/attention"]


def test_an_annotated_model_computes_the_same(model: TransformerLM) -> None:
    plain = model(TOKENS)
    with annotated(model, attention_in_parts=True), recording():
        assert torch.equal(model(TOKENS), plain)


def test_afterwards_the_model_is_as_it_was(model: TransformerLM, opened: list[str]) -> None:
    with annotated(model, attention_in_parts=True):
        pass
    model(TOKENS)
    assert opened == []
    modules = list(model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in modules)
    assert {vars(m)["attention"] for m in modules if "attention" in vars(m)} == {naive.attention}


def test_a_layer_that_raises_closes_its_range(model: TransformerLM, opened: list[str]) -> None:
    def fail(*inputs: Any) -> None:
        raise RuntimeError("out of memory")

    model.layers[1].register_forward_hook(fail)
    with annotated(model), pytest.raises(RuntimeError, match="out of memory"):
        model(TOKENS)
    assert opened[-1] == "/layers.1"


class OwnModel(nn.Module):
    """A user's model, with other names and no attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder.blocks:
            x = block(x)
        return x


def test_any_model_with_a_list_of_layers_can_be_annotated(opened: list[str]) -> None:
    model = OwnModel()
    with annotated(model):
        model(torch.ones(1, 4))
    assert opened[::2] == ["encoder.blocks.0", "encoder.blocks.1"]


def test_a_compiled_model_is_left_alone(model: TransformerLM) -> None:
    compilations: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    plain = compiled(TOKENS)
    with annotated(compiled), recording(), named("forward"):
        assert torch.equal(compiled(TOKENS), plain)
    assert len(compilations) == 1
