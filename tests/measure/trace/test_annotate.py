"""Ranges on a model's layers and the parts of its attention, added from outside and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmlab.attention import naive
from lmlab.measure.trace import annotate
from lmlab.measure.trace.annotate import annotated
from lmlab.measure.trace.attention_parts import with_part_ranges
from lmlab.measure.trace.ranges import recording
from lmlab.model.transformer import TransformerLM

TOKENS = torch.arange(8).reshape(1, 8)
Q, K, V = (torch.randn(1, 2, 4, 6) for _ in range(3))
PARTS = ["scores", "/scores", "softmax", "/softmax", "output", "/output"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that are opened and closed, in order."""
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


@pytest.mark.parametrize("parts", [[], PARTS], ids=["whole", "in-parts"])
def test_layers_and_attention_are_named_as_in_the_model_for_the_block(
    model: TransformerLM, opened: list[str], parts: list[str]
) -> None:
    plain = model(TOKENS)
    with annotated(model, attention_in_parts=bool(parts)), recording():
        assert torch.equal(model(TOKENS), plain)
    attention = ["attention", *parts, "/attention"]
    expected = ["layers.0", *attention, "/layers.0", "layers.1", *attention, "/layers.1"]
    assert opened == expected
    model(TOKENS)
    assert opened == expected, "afterwards the model is unchanged"
    modules = list(model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in modules)
    assert {vars(m)["attention"] for m in modules if "attention" in vars(m)} == {naive.attention}


def test_a_layer_that_raises_closes_its_range(model: TransformerLM, opened: list[str]) -> None:
    model.layers[1].register_forward_hook(lambda *inputs: 1 / 0)
    with annotated(model), pytest.raises(ZeroDivisionError):
        model(TOKENS)
    assert opened[-1] == "/layers.1"


def test_any_model_with_a_module_list_can_be_annotated(opened: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2))
    with annotated(model):
        model(torch.ones(1, 4, 8))
    assert opened[::2] == ["1.layers.0", "1.layers.1"]


def with_operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def with_bmm_and_a_third_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q[0], k[0].mT).softmax(-1), v[0]) @ torch.eye(6)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        *((f, PARTS) for f in (with_operators, with_einsum, with_bmm_and_a_third_product)),
        (functional.scaled_dot_product_attention, []),
    ],
)
def test_products_delimit_the_parts_of_attention(
    attention: Callable[..., Tensor], expected: list[str], opened: list[str]
) -> None:
    plain = with_part_ranges(attention)(Q, K, V)
    assert opened == [], "nothing happens outside a recording"
    with recording():
        assert torch.equal(with_part_ranges(attention)(Q, K, V), plain)
    assert opened == expected


def test_an_attention_that_raises_closes_its_part(opened: list[str]) -> None:
    with recording(), pytest.raises(ZeroDivisionError):
        with_part_ranges(lambda q, k, v: (q @ k.mT) / (1 / 0))(Q, K, V)
    assert opened == PARTS[:4]


def test_compiled_code_opens_no_ranges_and_is_compiled_once(
    model: TransformerLM, opened: list[str]
) -> None:
    compilations: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    attention = torch.compile(with_part_ranges(with_operators), backend=backend)
    plain = compiled(TOKENS), attention(Q, K, V)
    compiled_once = len(compilations)
    with annotated(compiled), recording():
        assert torch.equal(compiled(TOKENS), plain[0])
        assert torch.equal(attention(Q, K, V), plain[1])
    assert (opened, len(compilations)) == ([], compiled_once)
