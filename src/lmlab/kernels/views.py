"""Tensors as kernels see them: strides, TMA descriptors, and the memory layout of results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmlab.kernels.configs import BF16_TERMS

LONGEST_TILE = 512
"""Rows of the largest tile of any kernel: that of a single pass over rows of 16 numbers."""
TMA_ALIGNMENT = 16
"""Bytes to which TMA requires addresses and strides to be aligned."""


def addressable(tensor: Tensor) -> Tensor:
    """The tensor itself if a kernel can address it, else a contiguous copy."""
    return tensor if is_addressable(tensor) else tensor.contiguous()


def is_addressable(tensor: Tensor) -> bool:
    """Whether a kernel can address the tensor without a copy.

    The last dimension must be dense (that of a gradient expanded from a scalar is not), and offsets
    inside a tile must fit 32 bits.
    """
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return dense and tensor.stride(-2) * LONGEST_TILE < 2**31


def row_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row, in elements."""
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def empty_bshd(like: Tensor) -> Tensor:
    """An empty (batch, heads, rows, head_dim) tensor, in memory (batch, rows, heads, head_dim).

    Merging the heads of a token is then a view.
    """
    batch, heads, rows, head_dim = like.shape
    return like.new_empty(batch, rows, heads, head_dim).transpose(1, 2)


def empty_gradient(of: Tensor) -> Tensor:
    """An empty gradient with the layout of its tensor, which spares autograd a copy."""
    like = torch.empty_like(of)
    return like if is_addressable(like) else of.new_empty(of.shape)


def empty_terms(like: Tensor) -> Tensor:
    """An empty tensor for the terms of another, stacked along the batch (`fp32_terms`)."""
    batch, heads, rows, head_dim = like.shape
    # The interpreter cannot multiply bf16; there the first term is the whole number.
    dtype = torch.bfloat16 if like.is_cuda else torch.float32
    return like.new_empty(BF16_TERMS * batch, heads, rows, head_dim, dtype=dtype)


def supports_tma(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor, whose last dimension is dense."""
    unit = TMA_ALIGNMENT // tensor.dtype.itemsize
    aligned = tensor.data_ptr() % TMA_ALIGNMENT == 0
    return aligned and all(step > 0 and step % unit == 0 for step in tma_strides(tensor)[:-1])


def tma_descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """A descriptor for tiles of rows x columns of one head."""
    return TensorDescriptor(tensor, list(tensor.shape), tma_strides(tensor), [1, 1, rows, columns])


def tma_strides(tensor: Tensor) -> list[int]:
    """Strides for TMA, which checks the stride of a dimension of size one without using it."""
    unit = TMA_ALIGNMENT // tensor.dtype.itemsize
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return [*(unit if size == 1 else step for size, step in outer), 1]
