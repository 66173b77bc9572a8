"""The one place where ranges are opened, for both profilers at once.

    with ranges.named("forward"):
        loss = model(tokens)

Under Nsight Systems a range is an NVTX range of the *process* (`range_start`, not `range_push`):
autograd launches the backward pass from its own thread, and tools that attribute by thread would
give a pushed range none of those kernels. For PyTorch's profiler it is a `record_function`.

Outside `recording()` a range is one shared no-op object, so marks can stay in code that is timed.
No range is opened while `torch.compile` traces either, and that is checked first: a compiled
function then does not depend on whether a recording is active and is not recompiled when one
starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_NO_RANGE: AbstractContextManager[None] = nullcontext()


class _State:
    """Whether ranges are recorded now; NVTX only if there is a GPU to profile."""

    recording = False
    nvtx = False


class _Range(AbstractContextManager[None]):
    """A range that is open for the block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = record_function(name)
        self._handle: int | None = None

    def __enter__(self) -> None:
        if _State.nvtx:
            self._handle = torch.cuda.nvtx.range_start(self._name)
        self._record.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._record.__exit__(*exception)
        if self._handle is not None:
            torch.cuda.nvtx.range_end(self._handle)


def is_recording() -> bool:
    """Whether a range opened now would be recorded."""
    return not torch.compiler.is_compiling() and _State.recording


def named(name: str) -> AbstractContextManager[None]:
    """A range of that name around a block, if ranges are being recorded."""
    return _Range(name) if is_recording() else _NO_RANGE


def in_range(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, with each call of it in a range of that name."""

    @functools.wraps(function)
    def with_range(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with named(name):
            return function(*args, **kwargs)

    return with_range


@contextmanager
def recording() -> Iterator[None]:
    """Let `named` open ranges inside this block."""
    before = (_State.recording, _State.nvtx)
    _State.recording, _State.nvtx = True, torch.cuda.is_available()
    try:
        yield
    finally:
        _State.recording, _State.nvtx = before
