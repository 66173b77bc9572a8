"""The naive formula through torch.compile: what fusing gives without a new algorithm.

The compiler joins scale, mask and softmax into one or two kernels, so the scores are read and
written fewer times; both products still go through memory with all S x S of them.

Shapes are compiled one by one (`dynamic=False`), as a kernel for any shape would be slower than one
for this. PyTorch keeps a handful of compiled shapes; beyond that it would run the plain formula
without a word, and a benchmark would print eager times as compiled ones. Asking for one whole graph
makes that an error instead. Whoever measures many shapes resets the compiler between them.
"""

import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lmlab.attention import naive

_CPU_COMPILERS = ("c++", "g++", "clang++")


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), compiled at the first call."""
    return _compiled()(q, k, v, is_causal=is_causal)


@cache
def _compiled() -> Callable[..., Tensor]:
    # Not at import: it loads the compiler, which takes seconds.
    return torch.compile(naive.attention, fullgraph=True, dynamic=False)


def why_unsupported(
    function: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """One line on why nothing can be compiled here; None when it can."""
    if device.type == "cpu" and not any(map(shutil.which, _CPU_COMPILERS)):
        names = ", ".join(_CPU_COMPILERS)
        return f"torch.compile needs a C++ compiler on a CPU, found none of {names}"
    return None
