"""LM head and cross-entropy without logits, against PyTorch's two operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmlab.kernels import fused_loss
from lmlab.kernels.fused_loss import fused_linear_cross_entropy

HAS_GPU = torch.cuda.is_available()


def problem(
    tokens: int, words: int, depth: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + words)
    hidden = torch.randn(tokens, depth, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(words, depth, generator=generator).to(device, dtype) / depth**0.5
    targets = torch.randint(words, (tokens,), generator=generator).to(device)
    return hidden, weight.requires_grad_(), targets


def with_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    # A factor other than one shows whether backward uses the gradient it is given.
    return [loss, *torch.autograd.grad(3 * loss, inputs)]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 150), words=st.integers(2, 200), depth=st.integers(1, 80))
def test_any_shape(tokens: int, words: int, depth: int) -> None:
    hidden, weight, targets = problem(tokens, words, depth)
    found = with_gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden, weight)
    plain = F.cross_entropy(F.linear(hidden, weight), targets)
    torch.testing.assert_close(found, with_gradients(plain, hidden, weight), atol=2e-6, rtol=2e-5)


def test_chunks_of_the_vocabulary_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = problem(20, 300, 32)
    whole = with_gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden, weight)
    monkeypatch.setattr(fused_loss, "LARGEST_CHUNK", 100)
    parts = with_gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden, weight)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_leading_dimensions_are_tokens_and_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = problem(12, 40, 16)
    scaled = hidden.detach() * 1000
    found = fused_linear_cross_entropy(scaled.view(3, 4, 16), weight, targets.view(3, 4))
    expected = F.cross_entropy(F.linear(scaled, weight), targets)
    torch.testing.assert_close(found, expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, targets = problem(4, 8, 16)
    with pytest.raises(ValueError, match="do not fit"):
        fused_linear_cross_entropy(hidden, weight, targets[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("words", [1000, 10_000, 20_011])
def test_bf16_on_a_gpu_needs_less_memory_and_is_as_exact(words: int) -> None:
    hidden, weight, targets = problem(2000, words, 768, "cuda", torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected = with_gradients(F.cross_entropy(F.linear(*wide), targets), *wide)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = with_gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden, weight)
    peak = torch.cuda.max_memory_allocated() - before
    for ours, exact in zip(found, expected, strict=True):
        error = (ours.float() - exact).norm() / exact.norm()
        assert error < 2e-2
    if words > 2 * fused_loss.LARGEST_CHUNK:
        assert peak < 2000 * words * 4
