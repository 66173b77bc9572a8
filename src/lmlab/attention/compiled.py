"""Naive attention through torch.compile: what fusion alone gains, without a new algorithm.

The compiler fuses scale, mask and softmax into one or two kernels, so the scores are read and
written fewer times; both matmuls still move the full S x S matrix through memory.

Each shape is compiled separately (`dynamic=False`), because a shape-generic kernel would be slower.
Past its recompile limit PyTorch silently falls back to eager code, and a benchmark would report
eager times as compiled ones; `fullgraph=True` turns that into an error. Callers that measure many
shapes reset the compiler between them.
"""

import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmlab.attention import naive

_CPU_COMPILERS = ("c++", "g++", "clang++")


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), compiled at the first call."""
    output: Tensor = whole_graph(naive.attention)(q, k, v, is_causal=is_causal)
    return output


@cache
def whole_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function per shape; not at import, because loading the compiler takes seconds."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why nothing can be compiled here, in one line; None if it can."""
    if device.type == "cpu" and not any(map(shutil.which, _CPU_COMPILERS)):
        names = ", ".join(_CPU_COMPILERS)
        return f"torch.compile needs a C++ compiler on a CPU, found none of {names}"
    return None
