"""The reference: outputs and gradients in fp32, a block of queries at a time, at any length.

Every variant is checked in the same process and at the very shape that is timed. The naive formula
does not fit where it matters most, so the same formula is applied to a few hundred queries at a
time: exact in fp32 (TF32 off), one block of scores in memory, fast even for 65,536 queries.

Under a causal mask the first rows average few values and the last ones many, so rows shrink along
the sequence, and one norm over all of them would hide a wrong tile at the end. The error is
therefore the largest of |x - expected| / |expected| over blocks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.measure.precision import tf32_allowed

SCORES_PER_BLOCK = 2**26
"""Scores held at a time: 256 MiB in fp32."""
ROWS_PER_BLOCK = 64
"""Rows over which an error is taken."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative error, by type. TF32 products have errors of about 1e-3 and must not pass as
fp32; 16-bit types hold two to three digits of every score and weight."""

NAMES: tuple[str, ...] = ("output", "grad_q", "grad_k", "grad_v")


@torch.no_grad()
def reference(
    q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in fp32."""
    flat = [x.detach().float().reshape(-1, *x.shape[-2:]) for x in (q, k, v, grad_o)]
    found = [torch.zeros_like(flat[0]) for _ in NAMES]
    with tf32_allowed(False):
        for rows in _blocks(flat[0].shape):
            _add_block(found, flat, rows, is_causal)
    return tuple(x.reshape(q.shape) for x in found)


def _blocks(shape: torch.Size) -> list[slice]:
    pairs, length = shape[0], shape[1]
    step = max(1, min(length, SCORES_PER_BLOCK // (pairs * length)))
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
    found: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str] = NAMES
) -> dict[str, float]:
    """The largest relative error of each tensor over blocks of rows."""
    pairs = zip(names, found, expected, strict=True)
    return {name: _largest_error(x.detach(), y) for name, x, y in pairs}


def _largest_error(found: Tensor, expected: Tensor) -> float:
    length = expected.shape[-2]
    blocks = -(-length // ROWS_PER_BLOCK)

    def by_block(x: Tensor) -> Tensor:
        rows = x.square().sum(-1).reshape(-1, length)
        padded = torch.nn.functional.pad(rows, (0, blocks * ROWS_PER_BLOCK - length))
        return padded.unflatten(-1, (blocks, -1)).sum(-1)

    return float((by_block(found.float() - expected) / by_block(expected)).sqrt().max())


def check(found: Mapping[str, float], dtype: torch.dtype) -> None:
    """Raise `WrongNumbers` if an error is larger than the type explains."""
    allowed = TOLERANCE[dtype]
    wrong = {name: error for name, error in found.items() if not error <= allowed}
    if wrong:
        listed = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
        raise WrongNumbers(f"relative error of {listed}; allowed: {allowed:.0e}")
