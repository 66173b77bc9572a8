"""Two chains of operations, each fused into one kernel: RMSNorm, and bias, GELU, dropout, residual.

Run one by one, every operation reads its input from memory and writes its output back. Fused, the
chain reads its inputs once, keeps intermediate results in registers, and writes once.

Dropout hashes the element's index and the seed instead of storing random numbers or a mask: any
kernel that repeats the hash gets the same mask.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmlab.kernels.interpreted import kernel_for

BLOCK = 1024


@triton.jit
def rms_norm_kernel(x, weight, y, columns, eps, BLOCK: tl.constexpr):
    """Normalize one row per program, reading it once."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    wide = tl.load(x + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = 1 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    scaled = wide * inverse_rms * tl.load(weight + offsets, mask=mask, other=0.0)
    tl.store(y + row * columns + offsets, scaled.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gelu_dropout_kernel(
    x, bias, residual, y, size, columns, seed, threshold, scale, BLOCK: tl.constexpr
):
    """y = residual + dropout(gelu(x + bias)); an element is kept if its hash is at least the
    threshold."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    shifted = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    shifted += tl.load(bias + offsets % columns, mask=mask, other=0.0)
    inner = 1.5957691216057308 * (shifted + 0.044715 * shifted * shifted * shifted)
    gelu = shifted / (1 + tl.exp(-inner))
    hashed = (offsets + seed).to(tl.uint32)
    hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D
    hashed = (hashed ^ (hashed >> 15)) * 0x846CA68B
    hashed = hashed ^ (hashed >> 16)
    kept = tl.where(hashed.to(tl.int64) >= threshold, gelu * scale, 0.0)
    total = kept + tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of a contiguous x."""
    y = torch.empty_like(x)
    columns = x.shape[-1]
    kernel_for(rms_norm_kernel, x.device)[(x.numel() // columns,)](
        x, weight, y, columns, eps, BLOCK=triton.next_power_of_2(columns), num_warps=8
    )
    return y


def gelu_dropout_residual(
    x: Tensor, bias: Tensor, residual: Tensor, *, p: float, seed: int
) -> Tensor:
    """residual + dropout(gelu(x + bias)), GELU in its tanh form, for contiguous tensors."""
    y = torch.empty_like(x)
    kernel_for(gelu_dropout_kernel, x.device)[(-(-x.numel() // BLOCK),)](
        x, bias, residual, y, x.numel(), x.shape[-1], seed, int(p * 2**32), 1 / (1 - p),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return y
