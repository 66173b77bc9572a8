"""Records the collectives that torch starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = {
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


@dataclass(frozen=True)
class Message:
    """One collective, with the size of the larger of its tensors."""

    kind: str
    numel: int
    dtype: torch.dtype
    is_async: bool


@contextmanager
def recorded_messages() -> Iterator[list[Any]]:
    """A list that receives a Message per collective; tests may append entries of their own."""
    log: list[Any] = []
    with mock.patch.multiple(
        dist, **{name: _recording(name, log) for name in KINDS if hasattr(dist, name)}
    ):
        yield log


def _recording(name: str, log: list[Any]) -> Any:
    original = getattr(dist, name)

    def collective(*tensors: Tensor, **options: Any) -> Any:
        largest = max(tensors, key=lambda tensor: tensor.numel())
        is_async = bool(options.get("async_op"))
        log.append(Message(KINDS[name], largest.numel(), largest.dtype, is_async))
        return original(*tensors, **options)

    return collective
