"""FlashAttention-4 (CuTe DSL), measured where its package is installed: `pip install flash-attn-4`.

It takes (batch, sequence, heads, head_dim), 16-bit types and head dimensions up to 128, and runs on
Hopper and Blackwell. `flash_attn_4_deterministic` accumulates dQ in a fixed order, as our kernels
do. Compiled kernels are cached on disk, like Triton's, because each takes many seconds to compile.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lmlab.attention.inputs import fold, unfold

MAX_HEAD_DIM = 128


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    return _attend(q, k, v, causal=is_causal)


def deterministic(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """The same, with gradients that are bitwise reproducible from run to run."""
    return _attend(q, k, v, causal=is_causal, deterministic=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
    output = _function()(*(fold(x).transpose(1, 2) for x in (q, k, v)), **options)
    # Some versions return the log-sum-exp as well.
    o: Tensor = output[0] if isinstance(output, tuple) else output
    return unfold(o.transpose(1, 2), q)


@cache
def _function() -> Any:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_module("flash_attn.cute").flash_attn_func


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why FlashAttention-4 cannot run such inputs here, in one line; None if it can."""
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "flash-attn-4 is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "FlashAttention-4 needs a Hopper or Blackwell GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention-4 needs float16 or bfloat16, got {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"FlashAttention-4 needs head_dim {MAX_HEAD_DIM} or less, got {head_dim}"
    return None
