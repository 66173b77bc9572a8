"""Our FlashAttention-2: exact attention in one Triton kernel forward and one to three backward.

Scores are made, used and dropped inside the chip, so memory grows with the sequence and not with
its square, and time is spent on products instead of moving scores; see `lmlab.kernels` for how.

- Head dimensions up to 256 (powers of two natively, others padded on the chip), any sequence length
  from 1, queries and keys of different length; a causal mask is aligned at the bottom right: the
  last query sees all keys, which is what continuing from a cache needs.
- fp32, fp16, bf16; under autocast, autocast's type. fp32 products are exact unless TF32 is asked
  for in PyTorch's own way. The same inputs give the same bits.
- On a CPU the kernels run in Triton's interpreter, for correctness and nothing else. Where tensors
  have no memory (on the device "meta"), results have none either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmlab.attention.flash_func import Gradient, Transformable
from lmlab.attention.flash_op import flash_backward, flash_forward
from lmlab.attention.inputs import (
    AttentionInputError,
    as_autocast_wants,
    check,
    fold,
    fold_all,
    unfold,
)
from lmlab.kernels import launch
from lmlab.kernels.configs import architecture

LARGEST_HEAD_DIM = 256
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d)."""
    return flash_attention(q, k, v, is_causal=is_causal)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d) for any leading dimensions.

    From four dimensions on, the heads (third from last) of q may be a multiple of those of k and v:
    grouped-query attention. `scale` is 1 / sqrt(d) unless given.
    """
    is_traced = torch.compiler.is_compiling()
    is_transformed = not is_traced and torch._C._are_functorch_transforms_active()
    if q.dim() in (3, 4) and not is_traced and not is_transformed:
        # It checks and casts by itself; on a short sequence doing so twice would show.
        return FlashAttention.apply(q, k, v, is_causal, scale)
    q, k, v = as_autocast_wants(q, k, v)
    check(q, k, v, is_causal)
    check_kernel_takes(q, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    folded = fold(q), fold(k), fold(v)
    if is_traced:
        o, _ = flash_forward(*folded, is_causal, scale)
    elif is_transformed:
        o, _ = Transformable.apply(*folded, is_causal, scale)
    else:
        o = FlashAttention.apply(*folded, is_causal, scale)
    return unfold(o, q)


class FlashAttention(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` of (batch, sequence, d); a causal mask is bottom-right.

    Saved for backward besides inputs and output: the log-sum-exp (batch, queries) in natural log.
    With a dimension of heads in the second place, the log-sum-exp has it too.
    """

    @classmethod
    def apply(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        """Attend; older versions of PyTorch would not take `is_causal` by its name."""
        return super().apply(q, k, v, is_causal, scale)

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """The output, of the type of q."""
        q, k, v = as_autocast_wants(q, k, v)
        check(q, k, v, is_causal)
        check_kernel_takes(q, scale)
        if q.dim() not in (3, 4):
            raise AttentionInputError(
                f"FlashAttention: q has shape {tuple(q.shape)}, allowed are (batch, queries, d) and"
                " (batch, heads, queries, d); flash_attention takes others"
            )
        ctx.is_causal = is_causal
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        folded = fold_all(q, k, v)
        if torch.compiler.is_compiling() or q.is_meta:
            o, lse = flash_forward(*folded, is_causal, ctx.scale)
        else:
            o, lse = launch.forward(*folded, is_causal=is_causal, scale=ctx.scale)
        o, lse = unfold(o, q), unfold(lse, q)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        q, k, v, o, lse = ctx.saved_tensors
        folded = *fold_all(grad_o, q, k, v, o), lse if q.dim() == 4 else lse.unsqueeze(1)
        if torch.compiler.is_compiling() or q.is_meta:
            grads = flash_backward(*folded, ctx.is_causal, ctx.scale)
        elif torch.is_grad_enabled():  # gradients of gradients are asked for, and must be refused
            grads = Gradient.apply(*folded, ctx.is_causal, ctx.scale)
        else:
            grads = launch.backward(*folded, is_causal=ctx.is_causal, scale=ctx.scale)
        return (*(unfold(grad, q) for grad in grads), None, None)


def check_kernel_takes(q: Tensor, scale: float | None) -> None:
    """Refuse what attention is defined for and these kernels are not."""
    reason = _why_not(q.device.type, q.dtype, q.shape[-1])
    if reason is not None:
        raise AttentionInputError(f"flash: {reason}")
    if scale is not None and not 0 < scale < float("inf"):
        raise AttentionInputError(f"flash: scale is {scale}, allowed is a positive number")


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """One line on why flash cannot run such inputs here, or not in a time that means anything."""
    if device.type == "cpu":
        return "on a CPU flash runs in Triton's interpreter, right, but its time means nothing"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if architecture(major, minor) is None:
            return f"flash needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
    return _why_not(device.type, dtype, head_dim)


def _why_not(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    if device_type not in ("cuda", "cpu", "meta"):
        return f"tensors are on {device_type}, allowed are CUDA GPUs and, interpreted, a CPU"
    if dtype not in TYPES:
        return f"type {dtype} is not one of {', '.join(map(str, TYPES))}"
    if dtype == torch.bfloat16 and device_type == "cpu":
        return "Triton's interpreter multiplies bfloat16 wrongly; float32 and float16 work on a CPU"
    if head_dim > LARGEST_HEAD_DIM:
        return f"head_dim is {head_dim}, allowed is up to {LARGEST_HEAD_DIM}"
    return None
