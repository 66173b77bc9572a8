"""Flash attention as PyTorch operators, opaque nodes for torch.compile and torch.func.

To PyTorch, a Triton launch from Python is arbitrary code that would break the compiler's graph. The
operators `lmlab::flash_forward` and `lmlab::flash_backward` have fake kernels (shape, dtype and
strides of the results), a gradient, and a vmap rule that folds the mapped dimension into the batch.
They are registered with the dispatcher directly: `torch.library.custom_op` would add Python
overhead to every call, more than attention over a short sequence takes.

Eager code bypasses them, because for a gradient the dispatcher calls into Python several times.
torch.func (grad, vjp, vmap) needs them wrapped in an `autograd.Function` with a separate
`setup_context`, and always prepares for a second derivative. The kernels support only the first, so
the gradient is a separate function that raises when differentiated; otherwise a second derivative
would silently come out as zero.
"""

from typing import Any

import torch
from torch import Tensor

from lmlab.kernels import launch
from lmlab.kernels.views import bshd_strides, gradient_strides, vector_strides

_LIBRARY = torch.library.Library("lmlab", "FRAGMENT")
_LIBRARY.define(
    "flash_forward(Tensor q, Tensor k, Tensor v, bool is_causal, float scale) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "flash_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)
flash_forward = torch.ops.lmlab.flash_forward.default
flash_backward = torch.ops.lmlab.flash_backward.default


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    *tensors, is_causal, scale = inputs
    return launch.forward(*tensors, is_causal=is_causal, scale=scale)


def _backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, is_causal, scale = inputs
    return launch.backward(*tensors, is_causal=is_causal, scale=scale)


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("flash_forward", _forward, _device)
    _LIBRARY.impl("flash_backward", _backward, _device)


@torch.library.register_fake("lmlab::flash_forward")
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    o = q.new_empty_strided(q.shape, bshd_strides(q.shape))
    return o, q.new_empty_strided(rows, vector_strides(rows), dtype=torch.float32)


@torch.library.register_fake("lmlab::flash_backward")
def _(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty_strided(x.shape, gradient_strides(x)) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    return (*flash_backward(grad_o, *ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None)


torch.library.register_autograd("lmlab::flash_forward", _differentiate, setup_context=_save)


def _vmap_rule(operator: Any) -> Any:
    """Fold the mapped dimension into the batch; results have it first."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        tensors, flags = arguments[:-2], arguments[-2:]  # is_causal and scale
        folded = (
            (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(tensors, in_dims, strict=False)
        )
        results = tuple(result.unflatten(0, (size, -1)) for result in operator(*folded, *flags))
        return results, (0,) * len(results)

    return rule


torch.library.register_vmap("lmlab::flash_forward", _vmap_rule(flash_forward))
torch.library.register_vmap("lmlab::flash_backward", _vmap_rule(flash_backward))


class Transformable(torch.autograd.Function):
    """`apply(q, k, v, is_causal, scale)` for four-dimensional inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        with torch.no_grad():  # use this function's gradient, not the operator's
            o, lse = flash_forward(*arguments)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the gradient needs."""
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, output)

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
