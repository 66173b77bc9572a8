"""Input validation with one-line errors, and conversion to the shapes and dtypes kernels take.

Leading dimensions are folded into batch and heads: (sequence, d), (batch, sequence, d) and (...,
heads, sequence, d) become (batch, heads, sequence, d), as views where strides allow. Keys and
values may have fewer heads than queries (grouped-query attention).
"""

import torch
from torch import Tensor


class AttentionInputError(ValueError):
    """Inputs that are invalid for attention, or that a variant does not support."""


def check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    """Raise for shapes, types and devices that do not match."""
    if not 2 <= q.dim() == k.dim() == v.dim():
        raise AttentionInputError(
            f"attention: q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions;"
            " allowed: the same number, at least 2"
        )
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or not _same_leading(q, k):
        raise AttentionInputError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not"
            " match; allowed: q (..., queries, d), k and v (..., keys, d); with four or more"
            " dimensions q may have a multiple of the heads of k and v"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise AttentionInputError(
            "attention: q, k and v must have one dtype and device, got"
            f" {', '.join(f'{x.dtype} on {x.device}' for x in (q, k, v))}"
        )
    if min(q.shape[-2], k.shape[-2], q.shape[-1]) < 1:
        raise AttentionInputError(
            f"attention: empty dimension in q {tuple(q.shape)} or k {tuple(k.shape)}"
        )
    if is_causal:
        check_causal_lengths(q.shape[-2], k.shape[-2])


def _same_leading(q: Tensor, k: Tensor) -> bool:
    if q.shape[:-2] == k.shape[:-2]:
        return True
    grouped = q.dim() > 3 and q.shape[:-3] == k.shape[:-3] and k.shape[-3] > 0
    return grouped and q.shape[-3] % k.shape[-3] == 0


def check_causal_lengths(queries: int, keys: int) -> None:
    """Raise for fewer keys than queries: a bottom-right mask would leave queries without keys."""
    if queries > keys:
        raise AttentionInputError(
            f"causal attention needs at least as many keys as queries, got {queries} queries"
            f" and {keys} keys"
        )


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for matrix products, if it is enabled."""
    device = q.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return q, k, v
    if q.dtype == torch.float64:  # autocast leaves it alone
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fold(tensor: Tensor) -> Tensor:
    """(..., sequence, d) as (batch, heads, sequence, d)."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.flatten(0, -4)


def fold_all(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fold tensors of equal rank; four-dimensional ones are returned unchanged."""
    return tensors if tensors[0].dim() == 4 else tuple(map(fold, tensors))


def unfold(folded: Tensor, like: Tensor) -> Tensor:
    """Restore the leading dimensions of `like`."""
    if like.dim() == 4:
        return folded
    if like.dim() == 3:
        return folded.squeeze(1)
    if like.dim() == 2:
        return folded[0, 0]
    return folded.unflatten(0, like.shape[:-3])
