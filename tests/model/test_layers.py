"""Layers start from the stated distribution and keep precision where it matters."""

import math

import pytest
import torch
import torch.nn.functional as F

from lmlab.model.layers import Embedding, Linear, RMSNorm, SwiGLU

# A normal distribution cut at 3 deviations has 0.9866 of the deviation left.
CUT_FACTOR = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / 2**0.5))


@pytest.mark.parametrize(("wide", "tall"), [(400, 400), (100, 700), (700, 100)])
def test_linear_weights_have_glorot_deviation_cut_at_three(wide: int, tall: int) -> None:
    torch.manual_seed(0)
    weight = Linear(wide, tall).weight.detach()
    deviation = math.sqrt(2 / (wide + tall))

    assert weight.shape == (tall, wide)
    assert weight.std().item() == pytest.approx(CUT_FACTOR * deviation, rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * deviation)
    # Of 70,000 and more draws some come close to the cut, and none lies beyond.
    assert 2.9 * deviation < weight.abs().max().item() <= 3.0 * deviation * (1 + 1e-6)


def test_embeddings_have_deviation_one_cut_at_three() -> None:
    torch.manual_seed(0)
    weight = Embedding(500, 200).weight.detach()

    assert weight.shape == (500, 200)
    assert weight.std().item() == pytest.approx(CUT_FACTOR, rel=0.01)
    assert 2.9 < weight.abs().max().item() <= 3.0


def test_norm_weights_start_at_one() -> None:
    assert torch.equal(RMSNorm(5).weight.detach(), torch.ones(5))


def test_linear_has_no_bias() -> None:
    assert torch.equal(Linear(3, 4)(torch.zeros(2, 3)), torch.zeros(2, 4))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3], ids=["eps matters", "unit", "large"])
def test_norm_agrees_with_torch(scale: float) -> None:
    norm = RMSNorm(16, dtype=torch.float64)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = scale * torch.randn(3, 5, 16, dtype=torch.float64)

    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, eps=1e-5))


def test_norm_of_fp16_numbers_whose_squares_overflow_is_finite_and_fp16() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert x.square().isinf().all()

    normed = RMSNorm(8)(x)

    assert normed.dtype == torch.float16
    assert torch.equal(normed, torch.ones(1, 8, dtype=torch.float16))


def test_norm_statistics_of_bf16_numbers_are_taken_in_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 512).to(torch.bfloat16)

    rounded_once = F.rms_norm(x.double(), (512,), eps=1e-5).to(torch.bfloat16)

    # A result that lies between two bf16 numbers may go either way; there are few of those.
    assert (RMSNorm(512)(x) != rounded_once).float().mean().item() < 0.005


def test_swiglu_gates_the_first_branch_with_the_third_matrix() -> None:
    ffn = SwiGLU(4, 6, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)

    first, gate = x @ ffn.w1.weight.T, x @ ffn.w3.weight.T
    expected = (first * torch.sigmoid(first) * gate) @ ffn.w2.weight.T

    torch.testing.assert_close(ffn(x), expected)
