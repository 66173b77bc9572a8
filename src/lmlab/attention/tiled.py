"""FlashAttention-2 in plain PyTorch, forward and backward: the readable version.

To normalize a row of scores S = Q K^T scale, the softmax needs only its maximum and the sum of its
exponentials, and both can be updated one tile of keys at a time:

    m' = max(m, rowmax(S_j))
    l' = l exp(m - m') + rowsum(exp(S_j - m'))
    O' = O exp(m - m') + exp(S_j - m') V_j

At the end O / l is the output, and the log-sum-exp L = m + log l, one number per query, is all that
the backward needs: P = exp(S - L) recomputes any tile of P. With D = rowsum(O * dO),

    dV = P^T dO,  dS = P * (dO V^T - D),  dQ = dS K scale,  dK = dS^T Q scale.

No sequence x sequence tensor ever exists; the price is computing Q K^T twice. The loop over tiles
is in Python, with several kernel launches per tile, so this is slow on a GPU; `flash` runs the same
loop inside one kernel. Accumulation is in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.attention.inputs import AttentionInputError, cast_for_autocast, check

MAX_TILE = 128
MIN_TILE = 16


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    check(q, k, v, is_causal)
    if q.shape[:-2] != k.shape[:-2]:
        raise AttentionInputError(
            f"tiled: q {tuple(q.shape)} and k {tuple(k.shape)} must have the same number of heads"
        )
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    output: Tensor = FlashAttentionTiled.apply(flat_q, flat_k, flat_v, is_causal)
    return output.reshape(q.shape)


class FlashAttentionTiled(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` for (batch, sequence, d).

    Saves inputs, output and the log-sum-exp (batch, queries).
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Any:
        """Attention; overridden because older PyTorch does not accept `is_causal` by keyword."""
        return super().apply(q, k, v, is_causal)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """The output, in the dtype of q."""
        if q.dim() != 3:
            raise AttentionInputError(
                f"FlashAttentionTiled: q has shape {tuple(q.shape)}; allowed: (batch, queries, d)"
            )
        q, k, v = cast_for_autocast(q, k, v)
        check(q, k, v, is_causal)
        if not q.dtype.is_floating_point:
            raise AttentionInputError(f"tiled: dtype is {q.dtype}; allowed: floating-point types")
        tiling = _Tiling.of(q, k, is_causal)
        o = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=tiling.dtype)
        with torch.autocast(q.device.type, enabled=False):
            for rows in _slices(tiling.queries, tiling.queries):
                o[:, rows], lse[:, rows] = _attend(tiling, q, k, v, rows)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.tiling = tiling
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v, in the dtype of q."""
        q, k, v, o, lse = ctx.saved_tensors
        tiling: _Tiling = ctx.tiling
        grads = [torch.zeros_like(x, dtype=tiling.dtype) for x in (q, k, v)]
        delta = (o.to(tiling.dtype) * grad_o.to(tiling.dtype)).sum(-1, keepdim=True)
        with torch.autocast(q.device.type, enabled=False):
            for rows in _slices(tiling.queries, tiling.queries):
                _add_gradients(tiling, grads, (q, k, v, grad_o, lse, delta), rows)
        grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
        return grad_q, grad_k, grad_v, None


@dataclass(frozen=True)
class _Tiling:
    """The tiles of one problem."""

    queries: int
    keys: int
    scale: float
    is_causal: bool
    dtype: torch.dtype
    """Type of products and accumulators."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool) -> _Tiling:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return cls(q.shape[1], k.shape[1], q.shape[2] ** -0.5, is_causal, dtype)

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """Slices of the keys visible to some query of `rows`, in order."""
        end = rows.stop + self.keys - self.queries if self.is_causal else self.keys
        return _slices(self.keys, end)

    def scores(self, q_tile: Tensor, k_tile: Tensor, rows: slice, columns: slice) -> Tensor:
        """Scaled scores of one tile, -inf where a key is in a query's future."""
        s = q_tile @ k_tile.transpose(-2, -1) * self.scale
        shift = self.keys - self.queries
        if not self.is_causal or columns.stop - 1 <= rows.start + shift:
            return s
        query = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=s.device)
        return s.masked_fill(key > query + shift, float("-inf"))


def _slices(length: int, end: int) -> Iterator[slice]:
    """Tiles up to `end`; beyond MIN_TILE at least two, so that no tile is sequence x sequence."""
    step = max(MIN_TILE, min(MAX_TILE, -(-length // 2)))
    return (slice(start, min(start + step, length)) for start in range(0, end, step))


def _attend(tiling: _Tiling, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one tile of queries."""
    q_tile = q[:, rows].to(tiling.dtype)
    row_max = torch.full_like(q_tile[..., :1], float("-inf"))
    row_sum = torch.zeros_like(row_max)
    acc = torch.zeros_like(q_tile)
    for columns in tiling.key_tiles(rows):
        s = tiling.scores(q_tile, k[:, columns].to(tiling.dtype), rows, columns)
        new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
        p = torch.exp(s - new_max)
        rescale = torch.exp(row_max - new_max)
        row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
        acc = acc * rescale + p @ v[:, columns].to(tiling.dtype)
        row_max = new_max
    return (acc / row_sum).to(q.dtype), (row_max + torch.log(row_sum)).squeeze(-1)


def _add_gradients(
    tiling: _Tiling, grads: list[Tensor], inputs: tuple[Tensor, ...], rows: slice
) -> None:
    """Accumulate the gradients that come from one tile of queries."""
    q, k, v, grad_o, lse, delta = inputs
    grad_q, grad_k, grad_v = grads
    q_tile, grad_tile = q[:, rows].to(tiling.dtype), grad_o[:, rows].to(tiling.dtype)
    for columns in tiling.key_tiles(rows):
        k_tile, v_tile = k[:, columns].to(tiling.dtype), v[:, columns].to(tiling.dtype)
        s = tiling.scores(q_tile, k_tile, rows, columns)
        p = torch.exp(s - lse[:, rows, None])
        grad_v[:, columns] += p.transpose(-2, -1) @ grad_tile
        dp = grad_tile @ v_tile.transpose(-2, -1)
        ds = p * (dp - delta[:, rows]) * tiling.scale
        grad_q[:, rows] += ds @ k_tile
        grad_k[:, columns] += ds.transpose(-2, -1) @ q_tile
