"""What the forward pass allocates, operator by operator, with names and weight copies.

A history has addresses and sizes; it does not say that an allocation is the softmax's result or
autocast's 16-bit copy of a weight. Nor do sizes: at 1,024 tokens and a width of 1,024 a
copied input is as large as a copied weight. So the forward pass is observed at the dispatcher: each
new storage is noted with its operator, the calling line, its shape and type, and whether it was
cast from a parameter. Backward is not observed: holding its tensors for a moment longer could
change what autograd reuses, and with it the peak.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmlab.measure.memory.sources import Source, source_of

SHORT_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class NewStorage:
    """A new storage and the operator that made it."""

    address: int
    size: int
    operator: str
    shape: tuple[int, ...]
    type: str
    copy_of: str | None
    """The parameter that it was cast from."""
    source: Source | None
    """The line of the program that called the operator."""

    def label(self) -> str:
        """`softmax 4×8×128×128 fp32`, or the weight that it is a copy of."""
        if self.copy_of is not None:
            return f"{self.type} copy of {self.copy_of}"
        return f"{self.operator} {'×'.join(map(str, self.shape))} {self.type}"


class Observer(TorchDispatchMode):
    """Notes every storage that an operator makes while it is active."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.storages: list[NewStorage] = []
        self._parameters = parameters

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {address_of(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if address_of(tensor) not in inputs:  # neither a view nor in place
                self.storages.append(self._describe(function, tensor, inputs))
        return result

    def _describe(self, function: Any, tensor: Tensor, inputs: Iterable[int]) -> NewStorage:
        operator = str(function.overloadpacket.__name__).strip("_")
        sources = [name for address in inputs if (name := self._parameters.get(address))]
        return NewStorage(
            address=address_of(tensor),
            size=tensor.untyped_storage().nbytes(),
            operator=operator,
            shape=tuple(tensor.shape),
            type=SHORT_TYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            copy_of=sources[0] if operator == "to_copy" and sources else None,
            source=source_of(_call_stack()),
        )


def address_of(tensor: Tensor) -> int:
    """Address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _call_stack() -> Iterator[dict[str, Any]]:
    """The stack of this thread, innermost first, in the form of a snapshot's frames."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back  # type: ignore[assignment]


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
