"""The judge of all variants: right by autograd in fp64, and not to be fooled by a wrong tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmlab.attention import naive
from lmlab.chapters.attention.measure import reference as judge
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
    monkeypatch.setattr(judge, "SCORES_A_BLOCK", scores)
    inputs = tensors(*shape)
    found = judge.reference(*inputs, is_causal=is_causal)
    for ours, right in zip(found, by_autograd(*inputs, is_causal=is_causal), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)


def right_ones(length: int = 300) -> tuple[Tensor, ...]:
    return judge.reference(*tensors(1, length, 8), is_causal=True)


def test_what_is_right_passes() -> None:
    right = right_ones()
    found = judge.errors([x.clone() for x in right], right)
    assert found == dict.fromkeys(judge.NAMES, 0.0)
    judge.check(found, torch.float32)


@pytest.mark.parametrize("name", judge.NAMES)
def test_one_wrong_tile_at_the_end_fails_although_its_numbers_are_small(name: str) -> None:
    right = right_ones()
    wrong = [x.clone() for x in right]
    wrong[judge.NAMES.index(name)][:, 270:290] = 0
    with pytest.raises(WrongNumbers, match=f"{name} off by"):
        judge.check(judge.errors(wrong, right), torch.bfloat16)


def test_products_in_tf32_do_not_pass_as_fp32() -> None:
    right = right_ones()
    noise = torch.Generator().manual_seed(1)
    off = [x * (1 + 5e-4 * torch.randn(x.shape, generator=noise)) for x in right]
    found = judge.errors(off, right)
    judge.check(found, torch.bfloat16)
    with pytest.raises(WrongNumbers):
        judge.check(found, torch.float32)


def test_not_a_number_is_wrong() -> None:
    right = right_ones()
    wrong = [right[0].clone(), *right[1:]]
    wrong[0][:, 5] = float("nan")
    with pytest.raises(WrongNumbers, match="output off by nan"):
        judge.check(judge.errors(wrong, right), torch.float16)


def test_every_type_of_the_study_has_a_tolerance() -> None:
    assert set(judge.TOLERANCE) == {torch.float32, torch.bfloat16, torch.float16}
