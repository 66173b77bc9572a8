"""Memory layouts: which tensors kernels can address, and how results are laid out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lmlab.kernels.step import Operand

LONGEST_TILE = 512
"""Rows of the largest tile of any kernel: that of a single pass over rows of 16 numbers."""
TMA_ALIGNMENT = 16
"""Bytes to which TMA requires addresses and strides to be aligned."""


def addressable(tensor: Tensor) -> Tensor:
    """The tensor itself if a kernel can address it, else a contiguous copy."""
    return tensor if is_addressable(tensor) else tensor.contiguous()


def is_addressable(tensor: Tensor) -> bool:
    """Whether a kernel can address the tensor without a copy.

    The last dimension must be dense (a gradient expanded from a scalar is not), and offsets inside
    a tile must fit in 32 bits.
    """
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return dense and tensor.stride(-2) * LONGEST_TILE < 2**31


def row_strides(x: Operand) -> tuple[int, int, int]:
    """Strides of batch, head and row, in elements."""
    batch, head, row, _ = x.strides
    return batch, head, row


def bshd_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Strides of a (batch, heads, rows, head_dim) tensor stored as (batch, rows, heads, head_dim).

    Merging a token's heads is then a view.
    """
    _, heads, rows, head_dim = shape
    return rows * heads * head_dim, head_dim, heads * head_dim, 1


def vector_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Strides of an fp32 (batch, heads, rows) tensor with rows padded to 16 bytes for TMA."""
    _, heads, rows = shape
    padded = (rows + 3) // 4 * 4
    return heads * padded, padded, 1


def gradient_strides(of: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in the layout of its tensor, which saves autograd a copy."""
    like = torch.empty_like(of, device="meta")
    return like.stride() if is_addressable(like) else torch.empty(of.shape, device="meta").stride()


def supports_tma(x: Operand) -> bool:
    """Whether TMA can read a tensor, given an aligned address and a dense last dimension."""
    unit = TMA_ALIGNMENT // x.dtype.itemsize
    return all(step > 0 and step % unit == 0 for step in tma_strides(x)[:-1])


def tma_strides(x: Operand) -> tuple[int, ...]:
    """Strides for TMA, which requires a valid stride even for dimensions of size one."""
    unit = TMA_ALIGNMENT // x.dtype.itemsize
    outer = zip(x.shape[:-1], x.strides[:-1], strict=True)
    return *(unit if size == 1 else step for size, step in outer), 1
