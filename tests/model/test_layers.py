"""Layers start from the stated distribution and keep precision where it matters."""

import math

import pytest
import torch
import torch.nn.functional as F

from lmlab.model.layers import Embedding, Linear, RMSNorm, SwiGLU

# Std of a standard normal distribution truncated at 3.
TRUNCATED = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / 2**0.5))


@pytest.mark.parametrize(
    ("layer", "shape", "std"),
    [
        (lambda: Linear(400, 400), (400, 400), math.sqrt(2 / 800)),
        (lambda: Linear(100, 700), (700, 100), math.sqrt(2 / 800)),
        (lambda: Embedding(500, 200), (500, 200), 1.0),
    ],
    ids=["square", "tall", "embedding"],
)
def test_initial_weights_are_truncated_normal(
    layer: type[Linear], shape: tuple[int, int], std: float
) -> None:
    torch.manual_seed(0)
    weight = layer().weight.detach()  # type: ignore[call-arg]
    assert weight.shape == shape
    assert weight.std().item() == pytest.approx(TRUNCATED * std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * std)
    # Of 70,000 draws and more some are close to the cutoff, and none is beyond.
    assert 2.9 * std < weight.abs().max().item() <= 3.0 * std * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm_agrees_with_torch(scale: float) -> None:
    norm = RMSNorm(16, dtype=torch.float64)
    assert torch.equal(norm.weight.detach(), torch.ones(16, dtype=torch.float64))
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = scale * torch.randn(3, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, eps=1e-5))


def test_norm_of_fp16_numbers_whose_squares_overflow() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert x.square().isinf().all()
    assert torch.equal(RMSNorm(8)(x), torch.ones(1, 8, dtype=torch.float16))


def test_norm_statistics_of_bf16_numbers_are_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 512).to(torch.bfloat16)
    rounded_once = F.rms_norm(x.double(), (512,), eps=1e-5).to(torch.bfloat16)
    # A few results halfway between two bf16 numbers may be rounded either way.
    assert (RMSNorm(512)(x) != rounded_once).float().mean().item() < 0.005


def test_swiglu_gates_the_first_branch_with_the_third_matrix() -> None:
    ffn = SwiGLU(4, 6, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    first, gate = x @ ffn.w1.weight.T, x @ ffn.w3.weight.T
    expected = (first * torch.sigmoid(first) * gate) @ ffn.w2.weight.T
    torch.testing.assert_close(ffn(x), expected)
