"""Naive attention is the formula: weights that sum to one over the keys a query may see."""

import math

import pytest
import torch
import torch.nn.functional as F

from lmlab.attention.naive import attention


def random_qkv(*leading: int, queries: int = 5, keys: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(*leading, length, 8, dtype=torch.float64, generator=generator)
        for length in (queries, keys, keys)
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_output_and_gradients_agree_with_torch(leading: tuple[int, ...], is_causal: bool) -> None:
    ours = [x.requires_grad_() for x in random_qkv(*leading)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]

    output = attention(*ours, is_causal=is_causal)
    expected = F.scaled_dot_product_attention(*theirs, is_causal=is_causal)
    torch.testing.assert_close(output, expected)

    output.square().sum().backward()
    expected.square().sum().backward()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad)


def test_scores_are_divided_by_the_root_of_the_head_dimension() -> None:
    q = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    k = torch.eye(4)[:2]
    v = torch.tensor([[1.0], [0.0]])

    weight = attention(q, k, v, is_causal=False).item()

    assert weight == pytest.approx(math.e / (math.e + 1.0))  # scores 2 / sqrt(4) = 1 and 0


def test_more_queries_than_keys_work_without_a_mask() -> None:
    q, k, v = random_qkv(queries=4, keys=3)

    assert attention(q, k, v, is_causal=False).shape == (4, 8)


def test_keeps_the_type_of_its_inputs() -> None:
    q, k, v = (tensor.to(torch.bfloat16) for tensor in random_qkv())

    assert attention(q, k, v, is_causal=True).dtype == torch.bfloat16
