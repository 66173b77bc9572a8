"""Attention's parts are seen from outside: by its products, only while ranges are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lmlab.attention import naive
from lmlab.measure.trace import attention_parts, ranges
from lmlab.measure.trace.attention_parts import in_parts
from lmlab.measure.trace.ranges import named, recording
from lmlab.measure.trace.torch_profiler import profile

Q, K, V = (torch.randn(1, 2, 4, 6) for _ in range(3))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that are opened and closed, in order."""
    log: list[str] = []

    @contextmanager
    def logged(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"/{name}")

    monkeypatch.setattr(ranges, "named", logged)
    return log


def with_operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def with_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q[0], k[0].mT).softmax(-1), v[0])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive.attention(q, k, v, is_causal=True)


SPELLINGS = [causal, with_operators, with_einsum, with_batches]
IN_ORDER = ["scores", "/scores", "softmax", "/softmax", "output", "/output"]


@pytest.mark.parametrize("attention", SPELLINGS)
def test_the_products_cut_attention_into_its_parts(
    attention: Callable[..., Tensor], opened: list[str]
) -> None:
    with recording():
        result = in_parts(attention)(Q, K, V)
    assert opened == IN_ORDER
    assert torch.equal(result, attention(Q, K, V))


def test_without_a_recording_nothing_is_watched(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("watched")

    monkeypatch.setattr(attention_parts, "_Parts", fail)
    in_parts(causal)(Q, K, V)
    assert opened == []


def test_an_attention_in_one_piece_has_no_parts(opened: list[str]) -> None:
    with recording():
        in_parts(functional.scaled_dot_product_attention)(Q, K, V)
    assert opened == []


def test_what_follows_the_second_product_belongs_to_no_part(opened: list[str]) -> None:
    def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (causal(q, k, v) @ torch.eye(6)) + 1

    with recording():
        in_parts(projected)(Q, K, V)
    assert opened == IN_ORDER


@pytest.mark.parametrize("wrong", ["scores", "softmax"])
def test_an_attention_that_raises_closes_its_part(wrong: str, opened: list[str]) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ (k if wrong == "scores" else k.mT)
        return scores.softmax(dim=9)

    with recording(), pytest.raises((RuntimeError, IndexError)):
        in_parts(broken)(Q, K, V)
    assert opened[-1] == f"/{opened[-2]}"
    assert sorted(name for name in opened if name[0] != "/") == sorted(
        name[1:] for name in opened if name[0] == "/"
    )


def test_a_compiled_attention_is_compiled_once_with_and_without_a_recording() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(in_parts(causal), backend=backend)
    plain = compiled(Q, K, V)
    with recording():
        assert torch.equal(compiled(Q, K, V), plain)
    assert len(graphs) == 1


def test_operators_stand_in_the_part_that_launched_them() -> None:
    def run() -> None:
        with named("attention"):
            in_parts(causal)(Q, K, V)

    kernels = profile(run, device=torch.device("cpu")).kernels
    parts: dict[str, set[str]] = {}
    for path, name in zip(kernels["ranges"], kernels["name"], strict=True):
        parts.setdefault(path[1], set()).add(name)
    assert "aten::bmm" in parts["scores"] & parts["output"]
    assert {"aten::_softmax", "aten::mul", "aten::masked_fill_"} <= parts["softmax"]
    assert "aten::bmm" not in parts["softmax"]
