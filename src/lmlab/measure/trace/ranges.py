"""Named ranges of a program that both profilers record, and a way to add them to a model.

    with annotated(model, attention_in_parts=True), named("forward"):
        loss = model(tokens)

Under Nsight Systems a range is an NVTX range of the *process* (`range_start`, not `range_push`):
autograd launches the backward pass from its own thread, and tools that attribute by thread would
give a pushed range none of those kernels. For PyTorch's profiler it is a `record_function`.

Outside `recording()` a range is a shared no-op, so ranges can stay in code that is timed. Nor is
one opened while `torch.compile` traces, which is checked first: compiled code then does not depend
on whether a recording is active and is not recompiled when one starts.

`annotated` adds ranges to any model from outside: around each member of its module lists, named
after the module (`layers.3`), and around attention functions that modules hold. The wrappers cost
microseconds, so annotate for profiling and never for timing. Compiled modules are skipped: Dynamo
guards on a module's attributes and would recompile.

Unfused attention can be split at its two matrix products into `scores`, `softmax` (everything
between them: scale, mask, the softmax itself) and `output`. A `TorchFunctionMode` sees every call
into torch; the three ranges are contiguous, so that views and Python code between two operations
also belong to a part. A fused or compiled attention has no parts.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

ATTENTION = "attention"
"""The range around an attention function, and the attribute under which a module holds one."""
_PRODUCTS = frozenset(
    {
        *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm),
    }
)
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class _State:
    """Whether ranges are recorded now; NVTX only if there is a GPU to profile."""

    recording = False
    nvtx = False


@contextmanager
def recording() -> Iterator[None]:
    """Let `named` open ranges inside this block."""
    with patch.multiple(_State, recording=True, nvtx=torch.cuda.is_available()):
        yield


def is_recording() -> bool:
    """Whether a range opened now would be recorded."""
    return not torch.compiler.is_compiling() and _State.recording


def named(name: str) -> AbstractContextManager[None]:
    """A context manager that opens a range of that name if ranges are being recorded."""
    return _range(name) if is_recording() else _NO_RANGE


@contextmanager
def _range(name: str) -> Iterator[None]:
    handle = torch.cuda.nvtx.range_start(name) if _State.nvtx else None
    try:
        with record_function(name):
            yield
    finally:
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)


def in_range(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wrap a function so that every call runs in a range of that name."""

    @functools.wraps(function)
    def with_range(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with named(name):
            return function(*args, **kwargs)

    return with_range


@contextmanager
def annotated(model: nn.Module, *, attention_in_parts: bool = False) -> Iterator[None]:
    """Mark the layers and the attention of `model` for the block, then restore it."""
    with ExitStack() as undo:
        _mark("", model, attention_in_parts, undo)
        yield


def _mark(name: str, module: nn.Module, parts: bool, undo: ExitStack) -> None:
    """Mark a module and everything below it that is not compiled."""
    if _is_compiled(module):
        return
    function = vars(module).get(ATTENTION)  # not a submodule of that name
    if callable(function):
        wrapped = with_part_ranges(function) if parts else function
        undo.enter_context(patch.object(module, ATTENTION, in_range(ATTENTION, wrapped)))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        if isinstance(module, nn.ModuleList) and not _is_compiled(child):
            undo.enter_context(patch.object(child, "forward", in_range(path, child.forward)))
        _mark(path, child, parts, undo)


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is the result of `torch.compile(module)` or `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def with_part_ranges(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an attention function to open a range around each part while ranges are recorded."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Tensor:
        with _PartRanges() if is_recording() else _NO_RANGE:
            return function(*args, **kwargs)

    return observed


class _PartRanges(TorchFunctionMode):
    """Opens and closes the ranges at the products; a third product belongs to no part."""

    def __init__(self) -> None:
        super().__init__()
        self._products = 0
        self._part = ExitStack()

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
        self._part.close()
        if part is not None:
            self._part.enter_context(named(part))
