"""What comes in: checks with one clear line, and shapes and types as the kernels want them.

Any number of leading dimensions folds into batch and heads: (sequence, d), (batch, sequence, d),
(batch, heads, sequence, d) and longer ones all become (batch, heads, sequence, d), as views
wherever strides allow. With heads, keys and values may have fewer of them than queries, each then
serving a group of query heads.
"""

import torch
from torch import Tensor


class AttentionInputError(ValueError):
    """Inputs that attention is not defined for."""


def check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    """Refuse shapes, types and devices that do not go together."""
    if not 2 <= q.dim() == k.dim() == v.dim():
        raise AttentionInputError(
            "attention: q, k and v need as many dimensions as each other, two or more;"
            f" got {q.dim()}, {k.dim()} and {v.dim()}"
        )
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or not _same_leading(q, k):
        raise AttentionInputError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit;"
            " allowed are (..., queries, d) and twice (..., keys, d), where from four dimensions"
            " on the heads of q may be a multiple of those of k and v"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise AttentionInputError(
            "attention: q, k and v need one type and device, got"
            f" {', '.join(f'{x.dtype} on {x.device}' for x in (q, k, v))}"
        )
    if min(q.shape[-2], k.shape[-2], q.shape[-1]) < 1:
        raise AttentionInputError(
            f"attention: at least one query, key and feature is needed, got q {tuple(q.shape)}"
            f" and k {tuple(k.shape)}"
        )
    if is_causal:
        check_causal_lengths(q.shape[-2], k.shape[-2])


def _same_leading(q: Tensor, k: Tensor) -> bool:
    if q.shape[:-2] == k.shape[:-2]:
        return True
    grouped = q.dim() > 3 and q.shape[:-3] == k.shape[:-3] and k.shape[-3] > 0
    return grouped and q.shape[-3] % k.shape[-3] == 0


def check_causal_lengths(queries: int, keys: int) -> None:
    """A causal mask aligned at the bottom right leaves no query without a key."""
    if queries > keys:
        raise AttentionInputError(
            f"causal attention needs at least as many keys as queries, got {queries} queries"
            f" and {keys} keys"
        )


def as_autocast_wants(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs in autocast's type where autocast is on, as it does for matrix products."""
    device = q.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return q, k, v
    if q.dtype == torch.float64:  # autocast leaves it alone
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fold(tensor: Tensor) -> Tensor:
    """(..., sequence, d) as (batch, heads, sequence, d); without heads there is one."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.flatten(0, -4)


def fold_all(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of as many dimensions each, folded; with batch and heads they are so already."""
    return tensors if tensors[0].dim() == 4 else tuple(map(fold, tensors))


def unfold(folded: Tensor, like: Tensor) -> Tensor:
    """The folded result with the leading dimensions of `like`."""
    if like.dim() == 4:
        return folded
    if like.dim() == 3:
        return folded.squeeze(1)
    if like.dim() == 2:
        return folded[0, 0]
    return folded.unflatten(0, like.shape[:-3])
