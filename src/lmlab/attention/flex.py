"""FlexAttention: PyTorch's attention with a programmable mask, compiled into a fused kernel.

The causal mask is a predicate on (query, key) and a block mask derived from it, which lets the
kernel skip fully masked blocks. The block mask is cached, because building it costs more than
attention over a short sequence.

On a CPU the same function runs unfused over all scores, forward only.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lmlab.attention.compiled import whole_graph
from lmlab.attention.inputs import check_causal_lengths, fold, unfold

MIN_HEAD_DIM = 16


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    queries, keys = q.shape[-2], k.shape[-2]
    if is_causal:
        check_causal_lengths(queries, keys)
    mask = causal_block_mask(queries, keys, q.device) if is_causal else None
    attend: Any = whole_graph(flex_attention) if q.device.type == "cuda" else flex_attention
    return unfold(attend(fold(q), fold(k), fold(v), block_mask=mask), q)


@lru_cache(maxsize=64)
def causal_block_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    """The causal block mask, aligned at the bottom right."""
    shift = keys - queries

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + shift

    return create_block_mask(sees, None, None, queries, keys, device=str(device))


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why FlexAttention would not run fused here, in one line; None if it would."""
    if device.type != "cuda":
        return f"FlexAttention is fused on CUDA GPUs only, not on {device.type}"
    if head_dim < MIN_HEAD_DIM:
        return f"FlexAttention needs head_dim {MIN_HEAD_DIM} or more, got {head_dim}"
    return None
