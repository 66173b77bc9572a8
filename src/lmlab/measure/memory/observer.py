"""What the forward pass allocates, operator by operator, with names, weight copies and lines.

A history does not tell whether an allocation is the softmax's result or autocast's 16-bit copy of a
weight, and at 1,024 tokens and a width of 1,024 a copied input is as large as a copied weight. So
the forward pass is observed at the dispatcher: each new storage is recorded with its operator, the
calling line, its shape and type, and the parameter it was cast from, if any. Backward is not
observed: holding its tensors longer could change what autograd reuses, and with it the peak.

An allocation is attributed to the innermost line outside torch and the recorder. Gradients are
allocated on autograd's own thread, where no Python is running, so they have no line.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHORT_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Path parts of files that are not the program's own. The profiler cuts paths at the directory they
# were imported from; "<" starts the name of code that has no file.
NOT_THE_PROGRAM = (
    *("-packages/torch/", "^torch/"),
    *("/lmlab/measure/", "^lmlab/measure/"),
    *("/contextlib.py", "^contextlib.py"),
    "^<",
)


class Source(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class NewStorage:
    """A new storage and the operator that made it."""

    address: int
    size: int
    operator: str
    shape: tuple[int, ...]
    type: str
    copy_of: str | None  # the parameter that it was cast from
    source: Source | None  # the line of the program that called the operator

    def label(self) -> str:
        """`softmax 4×8×128×128 fp32`, or the weight that it is a copy of."""
        if self.copy_of is not None:
            return f"{self.type} copy of {self.copy_of}"
        return f"{self.operator} {'×'.join(map(str, self.shape))} {self.type}"


class Observer(TorchDispatchMode):
    """Records every storage that an operator creates while this mode is active."""

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


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _call_stack() -> Iterator[dict[str, Any]]:
    """The stack of this thread, innermost first, in the form of a snapshot's frames."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back  # type: ignore[assignment]


def source_of(frames: Iterable[Mapping[str, Any]]) -> Source | None:
    """The innermost line of the program itself; None if only torch was running."""
    for frame in frames:
        file = _program_file(str(frame["filename"]))
        if file is not None:
            return Source(file, int(frame["line"]), str(frame["name"]))
    return None


@cache  # a step has tens of thousands of frames and a few dozen files
def _program_file(name: str) -> str | None:
    """The path of a program file relative to its package; None for all other files."""
    if not name or any(part in f"^{name}" for part in NOT_THE_PROGRAM):
        return None
    parts = PurePosixPath(name).parts
    if "lmlab" in parts:
        # The last one: a checkout may itself be in a folder of that name.
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("lmlab") :])
    return "/".join(parts[-2:]).lstrip("/")
