"""The reference agrees with autograd in fp64, and one wrong tile is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmlab.attention import naive
from lmlab.chapters.attention.measure import reference as topic
from lmlab.chapters.attention.measure.variants import WrongNumbers


def tensors(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for _ in range(4))


def by_autograd(*inputs: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    q, k, v, grad_o = (x.double() for x in inputs)
    wide = [x.requires_grad_() for x in (q, k, v)]
    output = naive.attention(q, k, v, is_causal=is_causal)
    return (output.detach(), *torch.autograd.grad(output, wide, grad_o))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scores", [2**26, 1000, 1], ids=["one block", "blocks", "row by row"])
@pytest.mark.parametrize("shape", [(1, 70, 8), (2, 3, 33, 16)], ids=["no heads", "heads"])
def test_the_reference_is_autograd_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], scores: int, is_causal: bool
) -> None:
    monkeypatch.setattr(topic, "SCORES_PER_BLOCK", scores)
    inputs = tensors(*shape)
    found = topic.reference(*inputs, is_causal=is_causal)
    for ours, expected in zip(found, by_autograd(*inputs, is_causal=is_causal), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def expected_tensors(length: int = 300) -> tuple[Tensor, ...]:
    return topic.reference(*tensors(1, length, 8), is_causal=True)


@pytest.mark.parametrize("name", topic.NAMES)
@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_one_wrong_tile_among_small_rows_fails(name: str, number: float) -> None:
    expected = expected_tensors()
    wrong = [x.clone() for x in expected]
    wrong[topic.NAMES.index(name)][:, 270:290] = number
    with pytest.raises(WrongNumbers, match=name):
        topic.check(topic.errors(wrong, expected), torch.bfloat16)


def test_tf32_does_not_pass_as_fp32() -> None:
    expected = expected_tensors()
    noise = torch.Generator().manual_seed(1)
    off = [x * (1 + 5e-4 * torch.randn(x.shape, generator=noise)) for x in expected]
    found = topic.errors(off, expected)
    topic.check(found, torch.bfloat16)
    with pytest.raises(WrongNumbers):
        topic.check(found, torch.float32)
