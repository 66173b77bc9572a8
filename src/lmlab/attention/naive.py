"""Attention as the formula reads: softmax(Q K^T / sqrt(d)) V, one operation at a time.

Every intermediate goes through memory. The two matmuls do 4 S^2 d FLOPs on tensors of S^2 numbers,
so for head dimensions of 64 or 128 most of the time goes into moving the S x S scores (scale, mask,
softmax), far beyond their share of the FLOPs. These five steps are the baseline for fused variants;
the half above the diagonal is computed and discarded, as in the cost model's "full" convention.

Dtypes are the caller's. Under CUDA autocast the matmuls run in 16 bit and the softmax in fp32, with
a copy in each direction.
"""

import math

import torch
from torch import Tensor

from lmlab.attention.inputs import check_causal_lengths


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores * (1.0 / math.sqrt(q.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(future_mask(q, k), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v)


def future_mask(q: Tensor, k: Tensor) -> Tensor:
    """True where a key is in a query's future, aligned at the bottom right.

    With fewer queries than keys, the first keys precede all queries, as when decoding with a KV
    cache. With more, the first queries would see no key, which raises.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    check_causal_lengths(queries, keys)
    everything = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    return everything.triu_(diagonal=1 + keys - queries)
