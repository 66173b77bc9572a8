"""Flash attention under torch.func: grad, vjp, vmap and their compositions.

These transforms differentiate an `autograd.Function` of the newer form, whose saving is apart from
its forward, and they always prepare for a second derivative. The kernels have a first one only, so
the gradient is a function of its own that refuses to be differentiated; without it, a second
derivative would come out as zero and nobody would know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmlab.attention.flash_op import flash_backward, flash_forward


class Transformable(torch.autograd.Function):
    """`apply(q, k, v, is_causal, scale)` of four dimensions: output and log-sum-exp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        with torch.no_grad():  # the gradient is this function's, not the operator's
            o, lse = flash_forward(q, k, v, is_causal, scale)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the gradient needs."""
        q, k, v, ctx.is_causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        grads = Gradient.apply(grad_o, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return (*grads, None, None)


class Gradient(torch.autograd.Function):
    """`apply` takes what `flash_backward` does; its own gradient is an error and not zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            grad_q, grad_k, grad_v = flash_backward(*arguments)
        return grad_q, grad_k, grad_v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to save."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise RuntimeError("flash attention can be differentiated once, not twice")
