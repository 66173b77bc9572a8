"""Our Triton forward with a compiled PyTorch backward: what a forward kernel alone gains.

The forward kernel saves the log-sum-exp L of every row. From it, backward recomputes the weights,
P = exp(S - L), without the maximum or the sum (the equations are in `tiled`). The compiler fuses
elementwise operations, but P and dS are S x S tensors that go through memory: backward needs as
much memory as naive attention, forward does not.

Backward is compiled per shape; `fullgraph=True` turns a silent fallback to eager into an error.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.attention import compiled, flash
from lmlab.attention.flash_op import flash_forward
from lmlab.attention.inputs import AttentionInputError, cast_for_autocast, check, fold, unfold
from lmlab.attention.naive import future_mask


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    q, k, v = cast_for_autocast(q, k, v)
    check(q, k, v, is_causal)
    if q.shape[:-2] != k.shape[:-2]:
        raise AttentionInputError(
            f"flash_compiled_backward: q {tuple(q.shape)} and k {tuple(k.shape)} must have the"
            " same number of heads"
        )
    flash.check_supported(q, None)
    output: Tensor = FlashCompiledBackward.apply(fold(q), fold(k), fold(v), is_causal)
    return unfold(output, q)


class FlashCompiledBackward(torch.autograd.Function):
    """`apply(q, k, v, is_causal)` for (batch, heads, sequence, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """The output; saves it with the inputs and the log-sum-exp."""
        o, lse = flash_forward(q, k, v, is_causal, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        with torch.autocast(grad_o.device.type, enabled=False):
            grads = compiled.whole_graph(gradients)(*ctx.saved_tensors, grad_o, ctx.is_causal)
        return *grads, None


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, with the weights recomputed from the log-sum-exp."""
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-2, -1)).float() * scale
    if is_causal:
        scores = scores.masked_fill(future_mask(q, k), float("-inf"))
    weights = torch.exp(scores - lse.unsqueeze(-1))
    delta = (o.float() * grad_o.float()).sum(-1, keepdim=True)
    grad_weights = (grad_o @ v.transpose(-2, -1)).float()
    grad_scores = (weights * (grad_weights - delta) * scale).to(q.dtype)
    grad_v = weights.to(q.dtype).transpose(-2, -1) @ grad_o
    return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, grad_v


def why_unsupported(function: str, **asked: Any) -> str | None:
    """Why this variant is not measured on such inputs here, in one line; None if it is."""
    return flash.why_unsupported(function, **asked) or compiled.why_unsupported(function, **asked)
