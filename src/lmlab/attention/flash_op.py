"""Flash attention as PyTorch operators, opaque nodes for torch.compile and torch.func.

To PyTorch a Triton launch from Python is arbitrary code, at which the compiler would break the
graph. The operators `lmlab::flash_forward` and `lmlab::flash_backward` have fake kernels (shape,
type and strides of results), a gradient, and a vmap rule that folds the mapped dimension into the
batch.

Eager code does not use them: PyTorch's dispatcher in Python takes longer than attention over a
short sequence.
"""

from typing import Any

import torch
from torch import Tensor

from lmlab.kernels import launch
from lmlab.kernels.views import empty_bshd, empty_gradient


@torch.library.custom_op("lmlab::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp for inputs of (batch, heads, sequence, head_dim)."""
    return launch.forward(q, k, v, is_causal=is_causal, scale=scale)


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return empty_bshd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lmlab::flash_backward", mutates_args=())
def flash_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    return launch.backward(grad_o, q, k, v, o, lse, is_causal=is_causal, scale=scale)


@flash_backward.register_fake
def _(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(q), empty_gradient(k), empty_gradient(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    return (*flash_backward(grad_o, *ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None)


flash_forward.register_autograd(_differentiate, setup_context=_save)


def _vmap_rule(operator: Any) -> Any:
    """Fold the mapped dimension into the batch; results have it first."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        tensors, flags = arguments[:-2], arguments[-2:]  # is_causal and scale
        folded = (
            _batch_first(tensor, dim, size).flatten(0, 1)
            for tensor, dim in zip(tensors, in_dims, strict=False)
        )
        results = tuple(result.unflatten(0, (size, -1)) for result in operator(*folded, *flags))
        return results, (0,) * len(results)

    return rule


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Move the mapped dimension to the front, or expand a tensor that is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


flash_forward.register_vmap(_vmap_rule(flash_forward))
flash_backward.register_vmap(_vmap_rule(flash_backward))
