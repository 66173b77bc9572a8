"""What is right: outputs and gradients in fp32, block by block of queries, whatever the length.

Correctness comes before speed, in the same process and at the very shape that is timed. The naive
formula would be the natural judge, but it does not fit where it matters most, so the same formula
is applied to a few hundred queries at a time: exact in fp32 (TF32 off), no larger than a block of
scores, and a few hundredths of a second even for 65,536 queries.

Under a causal mask the first rows average few values and the last ones many, so their size falls
with the sequence; one norm over all would hide a wrong tile at the end. The error is therefore
taken block by block, as the largest of |x - right| / |right| over blocks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.measure.precision import tf32_allowed

SCORES_A_BLOCK = 2**26
"""Scores held at a time: 256 MiB in fp32."""
ROWS_A_BLOCK = 64
"""Rows over which an error is taken."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative error, by type. TF32 products are off by some 1e-3, and must not pass as fp32;
16-bit types keep three or four digits of every score and weight."""

NAMES = ("output", "grad_q", "grad_k", "grad_v")


@torch.no_grad()
def reference(
    q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in fp32, of the inputs' shape."""
    flat = [x.detach().float().reshape(-1, *x.shape[-2:]) for x in (q, k, v, grad_o)]
    found = [torch.zeros_like(flat[0]) for _ in NAMES]
    with tf32_allowed(False):
        for rows in _blocks(flat[0].shape):
            _add_block(found, flat, rows, is_causal)
    return tuple(x.reshape(q.shape) for x in found)


def _blocks(shape: torch.Size) -> list[slice]:
    pairs, length = shape[0], shape[1]
    step = max(1, min(length, SCORES_A_BLOCK // (pairs * length)))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _add_block(found: Sequence[Tensor], flat: Sequence[Tensor], rows: slice, causal: bool) -> None:
    q, k, v, grad_o = flat
    output, grad_q, grad_k, grad_v = found
    end = rows.stop if causal else q.shape[1]
    scale = q.shape[-1] ** -0.5
    keys, values = k[:, :end], v[:, :end]
    scores = q[:, rows] @ keys.transpose(-2, -1) * scale
    if causal:
        position = torch.arange(end, device=q.device)
        scores.masked_fill_(position > position[rows, None], float("-inf"))
    weights = torch.softmax(scores, -1)
    output[:, rows] = weights @ values
    grad_v[:, :end] += weights.transpose(-2, -1) @ grad_o[:, rows]
    grad_weights = grad_o[:, rows] @ values.transpose(-2, -1)
    delta = (grad_o[:, rows] * output[:, rows]).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * scale
    grad_q[:, rows] = grad_scores @ keys
    grad_k[:, :end] += grad_scores.transpose(-2, -1) @ q[:, rows]


def errors(
    found: Sequence[Tensor], right: Sequence[Tensor], names: Sequence[str] = NAMES
) -> dict[str, float]:
    """The largest relative error of each tensor over blocks of rows."""
    pairs = zip(names, found, right, strict=True)
    return {name: _largest_error(x.detach(), y) for name, x, y in pairs}


def _largest_error(found: Tensor, right: Tensor) -> float:
    length = right.shape[-2]
    off = (found.float() - right).square().sum(-1).reshape(-1, length)
    size = right.square().sum(-1).reshape(-1, length)
    blocks = -(-length // ROWS_A_BLOCK)
    share = torch.nn.functional.pad(off, (0, blocks * ROWS_A_BLOCK - length))
    whole = torch.nn.functional.pad(size, (0, blocks * ROWS_A_BLOCK - length))
    ratio = share.unflatten(-1, (blocks, -1)).sum(-1) / whole.unflatten(-1, (blocks, -1)).sum(-1)
    return float(ratio.sqrt().max())


def check(found: Mapping[str, float], dtype: torch.dtype) -> None:
    """Raise `WrongNumbers` if an error is larger than the type explains."""
    allowed = TOLERANCE[dtype]
    wrong = {name: error for name, error in found.items() if not error <= allowed}
    if wrong:
        told = ", ".join(f"{name} off by {error:.1e}" for name, error in wrong.items())
        raise WrongNumbers(f"{told}; allowed is {allowed:.0e}")
