"""FlexAttention: PyTorch's attention whose mask is a function, compiled into a fused kernel.

The causal mask is given twice: as a rule for single scores, and as a block mask, computed from it
once a shape, which lets the kernel skip blocks that are all masked. The block mask is remembered,
as building it costs more than attention over a short sequence.

On a CPU the same function runs as plain operations over all scores, forward only.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lmlab.attention.inputs import check_causal_lengths, fold, unfold

SMALLEST_HEAD_DIM = 16


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    queries, keys = q.shape[-2], k.shape[-2]
    if is_causal:
        check_causal_lengths(queries, keys)
    mask = causal_block_mask(queries, keys, q.device) if is_causal else None
    attend: Any = _compiled() if q.device.type == "cuda" else flex_attention
    return unfold(attend(fold(q), fold(k), fold(v), block_mask=mask), q)


@lru_cache(maxsize=64)
def causal_block_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    """Which blocks of scores are needed; the last query is aligned with the last key."""
    shift = keys - queries

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + shift

    return create_block_mask(sees, None, None, queries, keys, device=str(device))


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """One line on why FlexAttention would not be its fused kernel here; None when it is."""
    if device.type != "cuda":
        return f"FlexAttention is fused on CUDA GPUs only, on {device.type} it is plain operations"
    if head_dim < SMALLEST_HEAD_DIM:
        return f"FlexAttention needs head_dim {SMALLEST_HEAD_DIM} or more, got {head_dim}"
    return None
