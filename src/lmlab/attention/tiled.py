"""FlashAttention-2 in plain PyTorch: the algorithm to read, forward and backward.

softmax(S) V needs a row of scores S = Q K^T scale only through two numbers, its maximum and the sum
of its exponentials, and both can be kept up to date while the keys come by in tiles:

    m' = max(m, rowmax(S_j))
    l' = l exp(m - m') + rowsum(exp(S_j - m'))
    O' = O exp(m - m') + exp(S_j - m') V_j

At the end O / l is the output and L = m + log l, the log-sum-exp, one number a query, is all that
backward needs: P = exp(S - L) gives any tile of the weights again. With D = rowsum(O dO),

    dV = P^T dO,  dS = P (dO V^T - D),  dQ = dS K scale,  dK = dS^T Q scale.

So no tensor of sequence x sequence exists at any time; the price is Q K^T computed twice. Python
walks the tiles here, several launches each, so this is slow on a GPU; `flash` is the same walk
inside one kernel. Sums are in fp32 at least, in fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.attention.inputs import AttentionInputError, as_autocast_wants, check

LARGEST_TILE = 128
SMALLEST_TILE = 16


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    check(q, k, v, is_causal)
    if q.shape[:-2] != k.shape[:-2]:
        raise AttentionInputError(
            f"tiled: as many heads of keys as of queries are needed, got q {tuple(q.shape)}"
            f" and k {tuple(k.shape)}"
        )
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    output: Tensor = FlashAttentionTiled.apply(flat_q, flat_k, flat_v, is_causal)
    return output.reshape(q.shape)


class FlashAttentionTiled(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` of (batch, sequence, d); a causal mask is bottom-right.

    Saved for backward besides inputs and output: the log-sum-exp (batch, queries) in natural log.
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Any:
        """Attend; older versions of PyTorch would not take `is_causal` by its name."""
        return super().apply(q, k, v, is_causal)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """The output, of the type of q."""
        if q.dim() != 3:
            raise AttentionInputError(
                f"FlashAttentionTiled: q has shape {tuple(q.shape)}, allowed is (batch, queries, d)"
            )
        q, k, v = as_autocast_wants(q, k, v)
        check(q, k, v, is_causal)
        if not q.dtype.is_floating_point:
            raise AttentionInputError(f"tiled: {q.dtype} is not allowed; a float type is")
        walk = _Walk.of(q, k, is_causal)
        o = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=walk.dtype)
        with torch.autocast(q.device.type, enabled=False):
            for rows in walk.query_tiles():
                o[:, rows], lse[:, rows] = _attend(walk, q, k, v, rows)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.walk = walk
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v, each of the type of its input."""
        q, k, v, o, lse = ctx.saved_tensors
        walk: _Walk = ctx.walk
        grads = [torch.zeros_like(x, dtype=walk.dtype) for x in (q, k, v)]
        delta = (o.to(walk.dtype) * grad_o.to(walk.dtype)).sum(-1, keepdim=True)
        with torch.autocast(q.device.type, enabled=False):
            for rows in walk.query_tiles():
                _add_gradients(walk, grads, q, k, v, grad_o, lse, delta, rows)
        grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
        return grad_q, grad_k, grad_v, None


@dataclass(frozen=True)
class _Walk:
    """How the tiles of one problem are walked."""

    queries: int
    keys: int
    scale: float
    is_causal: bool
    dtype: torch.dtype
    """Type of products and sums."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool) -> _Walk:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return cls(q.shape[1], k.shape[1], q.shape[2] ** -0.5, is_causal, dtype)

    def query_tiles(self) -> Iterator[slice]:
        """Slices of the queries, in order."""
        return _slices(self.queries, self.queries)

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """Slices of the keys that some query of `rows` sees, in order."""
        end = rows.stop + self.keys - self.queries if self.is_causal else self.keys
        return _slices(self.keys, end)

    def scores(self, q_tile: Tensor, k_tile: Tensor, rows: slice, columns: slice) -> Tensor:
        """Scaled scores of one tile, minus infinity where a key lies in a query's future."""
        scores = q_tile @ k_tile.transpose(-2, -1) * self.scale
        shift = self.keys - self.queries
        if not self.is_causal or columns.stop - 1 <= rows.start + shift:
            return scores
        query = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=scores.device)
        return scores.masked_fill(key > query + shift, float("-inf"))


def _slices(length: int, end: int) -> Iterator[slice]:
    """Tiles of a sequence up to `end`; at least two, so that no tile is sequence x sequence."""
    step = max(SMALLEST_TILE, min(LARGEST_TILE, -(-length // 2)))
    return (slice(start, min(start + step, length)) for start in range(0, end, step))


def _attend(walk: _Walk, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one tile of queries."""
    q_tile = q[:, rows].to(walk.dtype)
    peak = torch.full_like(q_tile[..., :1], float("-inf"))
    total = torch.zeros_like(peak)
    acc = torch.zeros_like(q_tile)
    for columns in walk.key_tiles(rows):
        scores = walk.scores(q_tile, k[:, columns].to(walk.dtype), rows, columns)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        correction = torch.exp(peak - new_peak)
        total = total * correction + weights.sum(-1, keepdim=True)
        acc = acc * correction + weights @ v[:, columns].to(walk.dtype)
        peak = new_peak
    return (acc / total).to(q.dtype), (peak + torch.log(total)).squeeze(-1)


def _add_gradients(
    walk: _Walk,
    grads: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_o: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: slice,
) -> None:
    """Add what one tile of queries sends back, to it and to the keys and values that it saw."""
    grad_q, grad_k, grad_v = grads
    q_tile, grad_tile = q[:, rows].to(walk.dtype), grad_o[:, rows].to(walk.dtype)
    for columns in walk.key_tiles(rows):
        k_tile, v_tile = k[:, columns].to(walk.dtype), v[:, columns].to(walk.dtype)
        scores = walk.scores(q_tile, k_tile, rows, columns)
        weights = torch.exp(scores - lse[:, rows, None])
        grad_v[:, columns] += weights.transpose(-2, -1) @ grad_tile
        grad_weights = grad_tile @ v_tile.transpose(-2, -1)
        grad_scores = weights * (grad_weights - delta[:, rows]) * walk.scale
        grad_q[:, rows] += grad_scores @ k_tile
        grad_k[:, columns] += grad_scores.transpose(-2, -1) @ q_tile
