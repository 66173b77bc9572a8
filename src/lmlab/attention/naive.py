"""Attention as the formula says it: softmax(Q K^T / sqrt(d)) V, one operation after the other.

Every intermediate is written to memory and read back. The two products do 4 S^2 d operations on
tensors of S^2 numbers, so for head dimensions of 64 or 128 the time goes into moving the S x S
scores (scale, mask, softmax) and not into multiplying: the parts cost far more time than their
share of the FLOPs. That is the point of keeping this variant plain; fused variants are measured
against exactly these five steps, and the causal half above the diagonal is computed and thrown
away, as the cost model's "full" convention counts it.

The data types are those of the caller. Under CUDA autocast the products run in 16 bit and the
softmax in fp32, with a copy in each direction.
"""

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores * (1.0 / math.sqrt(q.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(future_mask(q, k), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v)


def future_mask(q: Tensor, k: Tensor) -> Tensor:
    """True where a key lies in a query's future; the last query is aligned with the last key.

    Aligned at the bottom right, fewer queries than keys mean that the first keys are the past of
    all of them, as when a model continues from a cache. More queries than keys would leave the
    first queries nothing to look at, for which no average exists.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries > keys:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {queries} queries"
            f" and {keys} keys"
        )
    everything = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    return everything.triu_(diagonal=1 + keys - queries)
