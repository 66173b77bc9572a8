"""PyTorch's `scaled_dot_product_attention`, pinned to one of its backends.

By default PyTorch picks a backend by shape, dtype and GPU, so a benchmark would not know which one
it measured. Here each backend is a variant: `flash` is FlashAttention-2 as shipped by PyTorch,
`cudnn` NVIDIA's library, `efficient` the memory-efficient kernel of xFormers, `math` unfused
operations much like `naive`. A backend that cannot run a case reports why instead of falling back.

PyTorch aligns a causal mask at the top left, this project at the bottom right. The two agree when
there are as many queries as keys; otherwise these variants raise.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmlab.attention.inputs import fold, unfold

_CAN_USE = {
    "flash": can_use_flash_attention,
    "cudnn": can_use_cudnn_attention,
    "efficient": can_use_efficient_attention,
}


# Four functions rather than four closures from one factory: torch.compile caches by code object,
# and variants sharing one would force each other to recompile.
def flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """FlashAttention-2 as PyTorch ships it."""
    return _attend(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal)


def cudnn(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """The kernels of NVIDIA's cuDNN."""
    return _attend(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal)


def efficient(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """The memory-efficient kernel."""
    return _attend(SDPBackend.EFFICIENT_ATTENTION, q, k, v, is_causal)


def math(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Unfused operations, with the scores in memory."""
    return _attend(SDPBackend.MATH, q, k, v, is_causal)


def _attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            "causal attention: PyTorch aligns the mask at the top left and needs as many"
            f" queries as keys, got {q.shape[-2]} queries and {k.shape[-2]} keys"
        )
    with sdpa_kernel(backend):
        folded = F.scaled_dot_product_attention(fold(q), fold(k), fold(v), is_causal=is_causal)
    return unfold(folded, q)


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why a backend cannot run such inputs here, in one line, quoting PyTorch where possible."""
    if function == "math" or (device.type == "cpu" and function == "flash"):
        return None
    if device.type != "cuda":
        return f"PyTorch's {function} attention needs a CUDA GPU, got {device.type}"
    sample = torch.empty(1, 1, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    params = SDPAParams(sample, sample, sample, None, 0.0, True, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if _CAN_USE[function](params, debug=True):
            return None
    reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
    unknown = f"PyTorch's {function} attention rejects such inputs without a reason"
    return reasons[-1] if reasons else unknown
