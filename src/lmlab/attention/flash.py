"""Our FlashAttention-2: exact attention in one forward and one to three backward Triton kernels.

Scores are computed, used and dropped on chip, so memory grows linearly with the sequence and time
goes into matmuls instead of moving scores; see `lmlab.kernels`.

- Head dimensions up to 256 (padded on chip to a power of two); sequences of any length, not
  necessarily equal for queries and keys, but not empty. The causal mask is aligned at the bottom
  right: the last query sees all keys, as decoding with a KV cache requires.
- fp32, fp16 and bf16; under autocast, its dtype. fp32 matmuls have fp32 accuracy unless TF32 is
  enabled through PyTorch's own settings. Results are deterministic.
- On a CPU the kernels run in Triton's interpreter, for correctness only. Tensors on the "meta"
  device give results on "meta".
"""

from typing import Any

import torch
from torch import Tensor

from lmlab.attention.flash_op import Gradient, Transformable, flash_backward, flash_forward
from lmlab.attention.inputs import (
    AttentionInputError,
    cast_for_autocast,
    check,
    fold,
    fold_all,
    unfold,
)
from lmlab.kernels import launch
from lmlab.kernels.problem import architecture

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks through which saved tensors go, or None; its argument is for tracing."""


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d) for any leading dimensions.

    With four or more dimensions, q may have a multiple of the heads (third from last) of k and v:
    grouped-query attention. `scale` defaults to 1 / sqrt(d).
    """
    is_traced = torch.compiler.is_compiling()
    is_transformed = not is_traced and torch._C._are_functorch_transforms_active()
    if q.dim() in (3, 4) and not is_traced and not is_transformed:
        # `forward` checks and casts; doing so twice would slow down short sequences.
        return FlashAttention.apply_eagerly(q, k, v, is_causal, scale)
    q, k, v = cast_for_autocast(q, k, v)
    check(q, k, v, is_causal)
    check_supported(q, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    folded = fold(q), fold(k), fold(v)
    if is_traced:
        o, _ = flash_forward(*folded, is_causal, scale)
    elif is_transformed:
        o, _ = Transformable.apply(*folded, is_causal, scale)
    else:
        o = FlashAttention.apply(*folded, is_causal, scale)
    return unfold(o, q)


attention = flash_attention


class FlashAttention(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` for (batch, sequence, d) or (batch, heads, sequence, d).

    Saves inputs, output and the log-sum-exp (batch, queries) or (batch, heads, queries).
    """

    @classmethod
    def apply(
        cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Any:
        """Attention; overridden because older PyTorch does not accept `is_causal` by keyword."""
        return super().apply(q, k, v, is_causal, scale)

    @classmethod
    def apply_eagerly(
        cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
    ) -> Any:
        """`apply` without `autograd.Function`'s Python overhead; no transform may be active."""
        return super(torch.autograd.Function, cls).apply(q, k, v, is_causal, scale)  # type: ignore[misc]

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """The output, in the dtype of q."""
        q, k, v = cast_for_autocast(q, k, v)
        ctx.is_causal = is_causal
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.forward = None
        if q.is_cuda and not torch.compiler.is_compiling():
            call, addresses = launch.find((q, k, v), is_causal, ctx.scale)
            if call is not None:
                o, lse = call((q, k, v), addresses)
                ctx.save_for_backward(q, k, v, o, lse)
                if _saved_tensor_hooks(True) is None:  # else they may be others in backward
                    ctx.forward = call, addresses
                return o
        check(q, k, v, is_causal)
        check_supported(q, scale)
        if q.dim() not in (3, 4):
            raise AttentionInputError(
                f"FlashAttention: q has shape {tuple(q.shape)}; allowed: (batch, queries, d),"
                " (batch, heads, queries, d); flash_attention accepts others"
            )
        ctx.scale = float(ctx.scale)
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
        q, k, v, o, lse = saved = ctx.saved_tensors
        is_traced = torch.compiler.is_compiling() or q.is_meta
        is_run = not is_traced and not torch.is_grad_enabled()
        options: dict[str, Any] = {"is_causal": ctx.is_causal, "scale": ctx.scale}
        found = is_run and ctx.forward and launch.follow(ctx.forward, grad_o, saved, **options)
        if found:
            return *found, None, None
        if is_run and q.dim() == 4:
            return *launch.backward(grad_o, q, k, v, o, lse, **options), None, None
        folded = *fold_all(grad_o, q, k, v, o), lse if q.dim() == 4 else lse.unsqueeze(1)
        if is_run:
            grads = launch.backward(*folded, **options)
        elif is_traced:
            grads = flash_backward(*folded, ctx.is_causal, ctx.scale)
        else:  # create_graph=True: a second derivative must raise
            grads = Gradient.apply(*folded, ctx.is_causal, ctx.scale)
        return (*(unfold(grad, q) for grad in grads), None, None)


def check_supported(q: Tensor, scale: float | None) -> None:
    """Raise for valid attention inputs that these kernels do not support."""
    reason = _unsupported_reason(q.device.type, q.dtype, q.shape[-1])
    if reason is not None:
        raise AttentionInputError(f"flash: {reason}")
    if scale is not None and not 0 < scale < float("inf"):
        raise AttentionInputError(f"flash: scale is {scale}; allowed: positive finite numbers")


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why flash is not measured on such inputs here, in one line; None if it is."""
    if device.type == "cpu":
        return "on a CPU flash runs in Triton's interpreter, whose time means nothing"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if architecture(major, minor) is None:
            return f"flash needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
    return _unsupported_reason(device.type, dtype, head_dim)


def _unsupported_reason(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    if device_type not in ("cuda", "cpu", "meta"):
        return f"tensors are on {device_type}; allowed: cuda, or cpu (interpreted)"
    if dtype not in DTYPES:
        return f"dtype is {dtype}; allowed: {', '.join(map(str, DTYPES))}"
    if dtype == torch.bfloat16 and device_type == "cpu":
        return "Triton's interpreter cannot multiply bfloat16; allowed on a CPU: float32, float16"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}; allowed: 1 to {MAX_HEAD_DIM}"
    return None
