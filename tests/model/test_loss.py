"""Cross-entropy agrees with torch's, in value and gradient, also where numbers are awkward."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.model.loss import cross_entropy


def reference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@settings(deadline=None, max_examples=30)
@given(
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    vocabulary=st.integers(1, 20),
    scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_agree_with_torch(
    leading: list[int], vocabulary: int, scale: float, seed: int
) -> None:
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


def test_targets_of_another_shape_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^targets must have shape \(6,\) .* got \(2, 3\)$"):
        cross_entropy(torch.randn(6, 5), torch.zeros(2, 3, dtype=torch.long))
