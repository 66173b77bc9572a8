"""Copies and sums that differ only in which addresses neighboring threads read.

Memory is fetched in sectors of 32 bytes. If the 32 threads of a warp read 32 adjacent fp32 numbers,
they need 4 sectors and use every byte. With strided addresses, each thread needs a sector of its
own from stride 8 on, and seven eighths of what is fetched is wasted.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmlab.kernels.interpreted import kernel_for

BLOCK = 1024


@triton.jit(do_not_specialize=["stride"])
def strided_copy_kernel(x, y, size, stride, BLOCK: tl.constexpr):
    """y[i] = x[i * stride], by the same instructions for every stride."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(y + offsets, tl.load(x + offsets * stride, mask=mask), mask=mask)


@triton.jit
def sum_kernel(x, y, length, outer_stride, inner_stride, OUTER: tl.constexpr, INNER: tl.constexpr):
    """y[o] = sum over i of x[o * outer_stride + i * inner_stride], OUTER sums per program."""
    outer = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    total = tl.full((OUTER,), 0.0, tl.float32)
    for start in range(0, length, INNER):
        inner = (start + tl.arange(0, INNER)).to(tl.int64)
        places = x + outer[None, :] * outer_stride + inner[:, None] * inner_stride
        total += tl.sum(tl.load(places), 0)
    tl.store(y + outer, total)


def strided_copy(x: Tensor, stride: int, out: Tensor) -> Tensor:
    """Copy every `stride`-th number of x to `out`."""
    size = out.numel()
    kernel_for(strided_copy_kernel, x.device)[(-(-size // BLOCK),)](
        x, out, size, stride, BLOCK=BLOCK, num_warps=4
    )
    return out


def matrix_sum(x: Tensor, dim: int, *, outer: int, inner: int) -> Tensor:
    """Sums of a row-major matrix over `dim`: `outer` sums per program, `inner` terms at a time.

    `outer` must divide the number of sums, `inner` the number of terms.
    """
    rows, columns = x.shape
    count, length = (columns, rows) if dim == 0 else (rows, columns)
    if count % outer or length % inner:
        raise ValueError(f"matrix_sum: {outer} x {inner} does not divide {count} x {length}")
    strides = (1, columns) if dim == 0 else (columns, 1)
    y = torch.empty(count, device=x.device)
    kernel_for(sum_kernel, x.device)[(count // outer,)](
        x, y, length, *strides, OUTER=outer, INNER=inner, num_warps=8
    )
    return y
