"""The small kernels, of principles, loss and optimizer, against PyTorch."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmlab.kernels import adamw, fused_loss
from lmlab.kernels.adamw import FusedAdamW
from lmlab.kernels.fused_loss import fused_linear_cross_entropy
from lmlab.kernels.principles_fusion import gelu_dropout_residual, rms_norm
from lmlab.kernels.principles_matmul import matmul
from lmlab.kernels.principles_memory import matrix_sum, strided_copy

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def kept(like: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """The elements that the kernel's hash keeps."""
    hashed = (torch.arange(like.numel(), device=like.device) + seed) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & 0xFFFFFFFF
    return (hashed >= int(p * 2**32)).view(like.shape)


@DEVICES
@pytest.mark.parametrize("columns", [16, 100])
def test_rms_norm(device: str, columns: int) -> None:
    x, weight = random(5, columns, device=device), random(columns, device=device)
    expected = F.rms_norm(x, (columns,), weight, eps=1e-5)
    torch.testing.assert_close(rms_norm(x, weight), expected, atol=1e-6, rtol=1e-5)


@DEVICES
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gelu_dropout_residual_drops_what_the_hash_says(device: str, p: float) -> None:
    x, bias = random(40, 60, device=device), random(60, device=device)
    residual = random(40, 60, device=device).flip(0).contiguous()
    keep = kept(x, p, seed=3)
    assert abs(keep.float().mean().item() - (1 - p)) < 0.05
    found = gelu_dropout_residual(x, bias, residual, p=p, seed=3)
    expected = residual + keep * F.gelu(x + bias, approximate="tanh") / (1 - p)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@DEVICES
@pytest.mark.parametrize("group", [0, 1, 2, 8])
@pytest.mark.parametrize("shape", [(32, 32, 32), (96, 64, 160)])
def test_matmul_in_every_order(device: str, shape: tuple[int, int, int], group: int) -> None:
    m, k, n = shape
    a, b = random(m, k, device=device), random(n, k, device=device).t().contiguous()
    found, _ = matmul(a, b, block_m=16, block_n=32, block_k=16, group=group)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-4)


@DEVICES
@pytest.mark.parametrize("stride", [1, 3, 32])
def test_strided_copy(device: str, stride: int) -> None:
    x = random(1500 * stride, device=device)
    assert torch.equal(strided_copy(x, stride, torch.empty(1500, device=device)), x[::stride])


@DEVICES
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (0, 8), (1, 1)])
def test_sums_over_rows_and_columns(device: str, dim: int, outer: int) -> None:
    x = random(32, 64, device=device)
    torch.testing.assert_close(matrix_sum(x, dim, outer=outer, inner=16), x.sum(dim))
    with pytest.raises(ValueError, match="does not divide"):
        matrix_sum(x, dim, outer=1, inner=24)


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
@settings(max_examples=8)
@given(tokens=st.integers(1, 150), words=st.integers(2, 200), depth=st.integers(1, 80))
def test_any_shape_and_number_of_chunks(tokens: int, words: int, depth: int) -> None:
    hidden, weight, targets = problem(tokens, words, depth)
    with mock.patch.object(fused_loss, "LARGEST_CHUNK", 100):  # most vocabularies take two
        loss = fused_linear_cross_entropy(hidden, weight, targets)
        found = with_gradients(loss, hidden, weight)
    plain = F.cross_entropy(F.linear(hidden, weight), targets)
    torch.testing.assert_close(found, with_gradients(plain, hidden, weight), atol=2e-6, rtol=2e-5)


def test_leading_dimensions_are_tokens_and_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = problem(12, 40, 16)
    scaled = hidden.detach() * 1000
    found = fused_linear_cross_entropy(scaled.view(3, 4, 16), weight, targets.view(3, 4))
    torch.testing.assert_close(found, F.cross_entropy(F.linear(scaled, weight), targets))


def test_shapes_that_do_not_fit_and_tiles_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples"):
        matmul(torch.zeros(48, 32), torch.zeros(32, 32), block_m=32, block_n=32)
    hidden, weight, targets = problem(4, 8, 16)
    with pytest.raises(ValueError, match="do not fit"):
        fused_linear_cross_entropy(hidden, weight, targets[:-1])
    for missing in (-100, -1, 8, 64):
        targets[1] = missing
        assert not fused_linear_cross_entropy(hidden, weight, targets).isfinite()


@pytest.mark.gpu
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
        assert (ours.float() - exact).norm() / exact.norm() < 2e-2
    if words > 2 * fused_loss.LARGEST_CHUNK:
        assert peak < 2000 * words * 4


SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()


def parameters_of(shapes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


@pytest.mark.slow
@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4), steps=st.integers(1, 3))
def test_any_number_of_parameters_of_any_size(sizes: list[int], steps: int) -> None:
    shapes: list[tuple[int, ...]] = [(size,) for size in sizes]
    ours, theirs = parameters_of(shapes, "cpu"), parameters_of(shapes, "cpu")
    trained(FusedAdamW(ours, **SETTINGS), ours, steps)
    trained(torch.optim.AdamW(theirs, **SETTINGS), theirs, steps)
    torch.testing.assert_close(list(ours), list(theirs), atol=2e-6, rtol=2e-6)


@DEVICES
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


@DEVICES
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
        optimizer.load_state_dict(optimizer.state_dict())
    master = optimizer.state[narrow]["master"]
    torch.testing.assert_close(master, wide.detach(), atol=1e-7, rtol=1e-6)
    assert not torch.equal(master, master.to(dtype).float())
    assert torch.equal(narrow.detach(), master.to(dtype))


def test_a_gradient_of_other_layout_is_made_to_fit_and_a_parameter_with_gaps_refused() -> None:
    ours, theirs = parameters_of([(8, 16)], "cpu"), parameters_of([(8, 16)], "cpu")
    for own, optimizer in ((ours, FusedAdamW(ours)), (theirs, torch.optim.AdamW(theirs))):
        own[0].grad = torch.arange(128.0).view(16, 8).t()
        assert optimizer.step(lambda own=own: own[0].grad.neg_().sum().item()) == -8128
    torch.testing.assert_close(ours[0], theirs[0])
    with_gaps = nn.Parameter(torch.zeros(8, 16)[:, ::2])
    with_gaps.grad = torch.ones(8, 8)
    with pytest.raises(ValueError, match="contiguous"):
        FusedAdamW([with_gaps]).step()
