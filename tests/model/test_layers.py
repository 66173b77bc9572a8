"""Layers, rotary embedding and loss agree with torch, also where numbers are awkward."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.model.layers import Embedding, Linear, RMSNorm, RotaryEmbedding
from lmlab.model.loss import cross_entropy

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
def test_initial_weights(layer: type[Linear], shape: tuple[int, int], std: float) -> None:
    torch.manual_seed(0)
    weight = layer().weight.detach()  # type: ignore[call-arg]
    assert weight.shape == shape
    assert weight.std().item() == pytest.approx(TRUNCATED * std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * std)
    # Of 70,000 draws and more some are close to the cutoff, and none is beyond.
    assert 2.9 * std < weight.abs().max().item() <= 3.0 * std * (1 + 1e-6)


def test_the_statistics_of_16_bit_numbers_are_fp32() -> None:
    large = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert large.square().isinf().all()
    assert torch.equal(RMSNorm(8)(large), torch.ones(1, 8, dtype=torch.float16))
    torch.manual_seed(0)
    x = torch.randn(4, 512).to(torch.bfloat16)
    rounded_once = F.rms_norm(x.double(), (512,), eps=1e-5).to(torch.bfloat16)
    # A few results halfway between two bf16 numbers may be rounded either way.
    assert (RMSNorm(512)(x) != rounded_once).float().mean().item() < 0.005


def test_tables_are_precise_at_far_positions_and_not_part_of_a_checkpoint() -> None:
    rope = RotaryEmbedding(2, 100_001, theta=1e4)
    assert rope.cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)
    assert rope.state_dict() == {}


def reference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@settings(max_examples=30)
@given(
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    vocabulary=st.integers(1, 20),
    scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_the_loss_of_torch(leading: list[int], vocabulary: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*leading, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, leading, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = cross_entropy(ours, targets), reference(theirs, targets)
    (3.0 * loss).backward()
    (3.0 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert torch.equal(ours.detach(), logits)


@pytest.mark.parametrize("height", [1e4, -1e4, 1e30])
def test_large_logits_neither_overflow_nor_lose_digits(height: float) -> None:
    logits = torch.full((1, 4), height, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([2]))
    loss.backward()
    # Four equal logits: log 4 and softmax 1/4, whatever their height.
    assert loss.item() == pytest.approx(math.log(4.0))
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.25, 0.25, -0.75, 0.25]]
    with pytest.raises(ValueError, match=r"^targets must have shape \(1,\) .* got \(2, 3\)$"):
        cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(64, 1000)).to(dtype).requires_grad_()
    targets = torch.randint(1000, (64,))
    with torch.autocast("cpu", dtype=dtype):
        loss = cross_entropy(logits, targets)
    # The logits were rounded before; no further digit may be lost.
    torch.testing.assert_close(loss, reference(logits.double(), targets).float())
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
