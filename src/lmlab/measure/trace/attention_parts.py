"""The parts of an attention written as its formula: product, softmax, product.

    scores    Q K^T, the first product
    softmax   all that lies between the two: scale, mask, softmax itself
    output    weights times V, the second product

The function itself carries no marks, so it is watched from outside: a `TorchFunctionMode` sees
every call into torch that it makes, and the products cut its run into parts. The ranges are
contiguous, three an attention, so that views and Python between two operations have a part too.

Outside a recording, and while `torch.compile` traces, the function runs as if nothing were here. A
mode around a compiled function would be one of its guards and compile it once more; such functions
are not to be watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmlab.measure.trace import ranges

SCORES, SOFTMAX, OUTPUT = "scores", "softmax", "output"
PARTS = (SCORES, SOFTMAX, OUTPUT)

_PRODUCTS = frozenset(
    {
        *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum),
        *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm),
    }
)


def in_parts(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The attention function with a range around each of its parts, while ranges are recorded."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not ranges.recorded():
            return function(*args, **kwargs)
        with _Parts():
            return function(*args, **kwargs)

    return watched


class _Parts(TorchFunctionMode):
    """Opens and closes the parts as the products go by; a third product belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self._products = 0
        self._open: AbstractContextManager[None] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        self._products += 1
        self._change({1: SCORES, 2: OUTPUT}.get(self._products))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._change(SOFTMAX if self._products == 1 else None)

    def __exit__(self, *exception: Any) -> None:
        self._change(None)
        super().__exit__(*exception)

    def _change(self, part: str | None) -> None:
        """Close the part that is open, then open the next."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None if part is None else ranges.named(part)
        if self._open is not None:
            self._open.__enter__()
