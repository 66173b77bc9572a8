"""Flash attention under torch.func: grad, vjp, vmap and their compositions.

These transforms need an `autograd.Function` with a separate `setup_context`, and always prepare for
a second derivative. The kernels have only a first one, so the gradient is a separate function
that raises when differentiated; otherwise a second derivative would silently come out as zero.
"""

from typing import Any

import torch
from torch import Tensor

from lmlab.attention.flash_op import flash_backward, flash_forward


class Transformable(torch.autograd.Function):
    """`apply(q, k, v, is_causal, scale)` for four-dimensional inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        with torch.no_grad():  # use this function's gradient, not the operator's
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
    """`flash_backward` as a function whose own gradient raises instead of being zero."""

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
        raise RuntimeError("flash attention has no second derivative")
