"""The small kernels of the principles chapter, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels.principles_fusion import gelu_dropout_residual, rms_norm
from lmlab.kernels.principles_matmul import matmul
from lmlab.kernels.principles_memory import matrix_sum, strided_copy

HAS_GPU = torch.cuda.is_available()
DEVICES = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")],
        ),
    ],
)


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


def test_another_seed_is_another_mask() -> None:
    x = torch.zeros(100, 10)
    assert not torch.equal(kept(x, 0.5, seed=0), kept(x, 0.5, seed=1000))


@DEVICES
@pytest.mark.parametrize("group", [0, 1, 2, 8])
@pytest.mark.parametrize("shape", [(32, 32, 32), (96, 64, 160)])
def test_matmul_in_every_order_of_tiles(
    device: str, shape: tuple[int, int, int], group: int
) -> None:
    m, k, n = shape
    a, b = random(m, k, device=device), random(n, k, device=device).t().contiguous()
    found, _ = matmul(a, b, block_m=16, block_n=32, block_k=16, group=group)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-4)


def test_tiles_must_divide_the_matrix() -> None:
    with pytest.raises(ValueError, match="multiples"):
        matmul(torch.zeros(48, 32), torch.zeros(32, 32), block_m=32, block_n=32)


@DEVICES
@pytest.mark.parametrize("stride", [1, 3, 32])
def test_strided_copy(device: str, stride: int) -> None:
    x = random(1500 * stride, device=device)
    out = torch.empty(1500, device=device)
    assert torch.equal(strided_copy(x, stride, out), x[::stride])


@DEVICES
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (0, 8), (1, 1)])
def test_sums_over_rows_and_columns(device: str, dim: int, outer: int) -> None:
    x = random(32, 64, device=device)
    torch.testing.assert_close(matrix_sum(x, dim, outer=outer, inner=16), x.sum(dim))
    with pytest.raises(ValueError, match="does not divide"):
        matrix_sum(x, dim, outer=1, inner=24)
