"""Attention variants that are wrong or run out of memory, for a race to cope with."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from lmlab.attention import naive


def upside_down(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention with its last rows wrong."""
    output = naive.attention(q, k, v, is_causal=is_causal)
    return output * (output.new_ones(output.shape[-2]).cumsum(0) < 40)[:, None]


def too_large(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> NoReturn:
    """Attention for which the memory never suffices."""
    raise MemoryError("no room")
