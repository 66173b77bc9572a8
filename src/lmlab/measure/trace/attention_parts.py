"""Ranges around the parts of an unfused attention: product, softmax, product.

    scores    Q K^T, the first product
    softmax   everything between the two: scale, mask, the softmax itself
    output    weights times V, the second product

The function itself carries no marks. A `TorchFunctionMode` sees every call into torch that it
makes, and the products delimit the parts. The three ranges are contiguous, so that views and Python
between two operations belong to a part too.

Outside a recording, and while `torch.compile` traces, the function runs unchanged. Do not use this
on a compiled function: the mode would become one of its guards and cause a recompilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmlab.measure.trace import ranges

_PRODUCTS = frozenset(
    {
        *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum),
        *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm),
    }
)


def with_part_ranges(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The attention function with a range around each of its parts, while ranges are recorded."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not ranges.is_recording():
            return function(*args, **kwargs)
        with _PartRanges():
            return function(*args, **kwargs)

    return observed


class _PartRanges(TorchFunctionMode):
    """Opens and closes the ranges at the products; a third product belongs to no part."""

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
        self._switch_to({1: "scores", 2: "output"}.get(self._products))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._switch_to("softmax" if self._products == 1 else None)

    def __exit__(self, *exception: Any) -> None:
        self._switch_to(None)
        super().__exit__(*exception)

    def _switch_to(self, part: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None if part is None else ranges.named(part)
        if self._open is not None:
            self._open.__enter__()
