"""Tensors as a kernel sees them: strides, tensor descriptors, and the layout of what it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmlab.kernels.configs import PARTS

LONGEST_TILE = 512
"""Rows of the largest tile of any kernel: a pass over rows of 16 numbers takes so many at once."""
COPY_ENGINE_ALIGNMENT = 16
"""Bytes on which addresses and strides must lie for the copy engine."""


def addressable(tensor: Tensor) -> Tensor:
    """The tensor itself if a kernel can walk it, else a contiguous copy.

    The last dimension must be dense (a gradient that was expanded from one number is not), and
    offsets inside a tile must fit 32 bits.
    """
    return tensor if is_addressable(tensor) else tensor.contiguous()


def is_addressable(tensor: Tensor) -> bool:
    """Whether a kernel can walk the tensor as it lies."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return dense and tensor.stride(-2) * LONGEST_TILE < 2**31


def row_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Elements from one batch, head and row to the next."""
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def empty_by_heads(like: Tensor) -> Tensor:
    """Memory for a tensor of that shape, the heads of one token side by side.

    (batch, heads, rows, head_dim), in memory (batch, rows, heads, head_dim): joining the heads of
    a token again is then a view.
    """
    batch, heads, rows, head_dim = like.shape
    return like.new_empty(batch, rows, heads, head_dim).transpose(1, 2)


def empty_gradient(of: Tensor) -> Tensor:
    """Memory for a gradient, laid out as its tensor is: autograd copies one that is not."""
    like = torch.empty_like(of)
    return like if is_addressable(like) else of.new_empty(of.shape)


def empty_parts(like: Tensor) -> Tensor:
    """Memory for a tensor's numbers in parts, one part after the other as if they were batches."""
    batch, heads, rows, head_dim = like.shape
    # The interpreter cannot multiply bf16; its first part is the whole number.
    kind = torch.bfloat16 if like.is_cuda else torch.float32
    return like.new_empty(PARTS * batch, heads, rows, head_dim, dtype=kind)


def has_descriptor(tensor: Tensor) -> bool:
    """Whether the copy engine can read the tensor; its last dimension is dense."""
    unit = COPY_ENGINE_ALIGNMENT // tensor.dtype.itemsize
    aligned = tensor.data_ptr() % COPY_ENGINE_ALIGNMENT == 0
    outer = engine_strides(tensor)[:-1]
    return aligned and all(step > 0 and step % unit == 0 for step in outer)


def descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """The tensor as the copy engine sees it, in tiles of rows x columns of one head."""
    strides = engine_strides(tensor)
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, columns])


def engine_strides(tensor: Tensor) -> list[int]:
    """Strides as the copy engine wants them.

    A dimension of size one is never stepped along, but its stride is checked all the same.
    """
    unit = COPY_ENGINE_ALIGNMENT // tensor.dtype.itemsize
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return [*(unit if size == 1 else step for size, step in outer), 1]
