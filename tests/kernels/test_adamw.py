"""Our AdamW against PyTorch's, in Triton's interpreter and as compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmlab.kernels import adamw
from lmlab.kernels.adamw import FusedAdamW

HAS_GPU = torch.cuda.is_available()
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")],
)
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        optimizer.step()


def parameters_of(shapes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4), steps=st.integers(1, 3))
def test_any_number_of_parameters_of_any_size(sizes: list[int], steps: int) -> None:
    shapes: list[tuple[int, ...]] = [(size,) for size in sizes]
    ours, theirs = parameters_of(shapes, "cpu"), parameters_of(shapes, "cpu")
    trained(FusedAdamW(ours, **SETTINGS), ours, steps)
    trained(torch.optim.AdamW(theirs, **SETTINGS), theirs, steps)
    torch.testing.assert_close(list(ours), list(theirs), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_groups_keep_their_settings_and_parameters_without_gradient_stay(device: str) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (adamw.BLOCK + 1,), (7,)]
    results = []
    for optimizer in (FusedAdamW, torch.optim.AdamW):
        own = parameters_of(shapes, device)
        groups = [{"params": own[:1], "lr": 0.1}, {"params": own[1:]}]
        trained(optimizer(groups, **SETTINGS), own[:2], 3)  # type: ignore[operator]
        results.append(own)
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=2e-6)
    assert torch.equal(results[0][2], parameters_of(shapes, device)[2])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_16_bit_parameter_is_its_rounded_fp32_master(device: str) -> None:
    """Steps far smaller than a step of 16 bits add up in the master."""
    # Triton's interpreter truncates bf16 instead of rounding it.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    (weight,) = parameters_of([(300,)], device)
    narrow = nn.Parameter(weight.detach().to(dtype))
    optimizer = FusedAdamW([narrow], lr=1e-5, weight_decay=0.0)
    wide = nn.Parameter(narrow.detach().float())
    reference = torch.optim.AdamW([wide], lr=1e-5, weight_decay=0.0)
    for _ in range(4):
        for each in (narrow, wide):
            each.grad = torch.ones_like(each)
        optimizer.step()
        reference.step()
    master = optimizer.state[narrow]["master"]
    torch.testing.assert_close(master, wide.detach(), atol=1e-7, rtol=1e-6)
    assert not torch.equal(master, master.to(dtype).float())
    assert torch.equal(narrow.detach(), master.to(dtype))


def test_a_gradient_of_other_layout_is_made_to_fit() -> None:
    ours, theirs = parameters_of([(8, 16)], "cpu"), parameters_of([(8, 16)], "cpu")
    for own, optimizer in ((ours, FusedAdamW(ours)), (theirs, torch.optim.AdamW(theirs))):
        own[0].grad = torch.arange(128.0).view(16, 8).t()
        optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0])


def test_a_parameter_with_gaps_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(8, 16)[:, ::2])
    parameter.grad = torch.ones(8, 8)
    with pytest.raises(ValueError, match="contiguous"):
        FusedAdamW([parameter]).step()
