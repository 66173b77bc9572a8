"""The one place where ranges are opened, for both profilers at once.

    with ranges.named("forward"):
        loss = model(tokens)

Under Nsight Systems a range is an NVTX range of the *process* (`range_start`, not `range_push`):
the autograd engine launches the backward pass from a thread of its own, and to tools that go by
thread a pushed range owns none of its kernels. For PyTorch's profiler it is a `record_function`.

Outside `recording()` a range is one shared object that does nothing, a fraction of a microsecond:
marks can stay in code that is timed. While `torch.compile` traces, no range is opened either, and
that is asked first: a compiled function then does not depend on whether a recording is under way,
and needs no recompilation when one begins.
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

_NOTHING: AbstractContextManager[None] = nullcontext()


class _Switch:
    """Whether ranges are recorded at present; NVTX only where there is a GPU to profile."""

    recording = False
    nvtx = False


class _Range(AbstractContextManager[None]):
    """A range that is open while the block runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = record_function(name)
        self._handle: int | None = None

    def __enter__(self) -> None:
        if _Switch.nvtx:
            self._handle = torch.cuda.nvtx.range_start(self._name)
        self._record.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._record.__exit__(*exception)
        if self._handle is not None:
            torch.cuda.nvtx.range_end(self._handle)


def recorded() -> bool:
    """Whether a range that is opened now would be recorded."""
    return not torch.compiler.is_compiling() and _Switch.recording


def named(name: str) -> AbstractContextManager[None]:
    """A range of that name around a block, if ranges are being recorded."""
    return _Range(name) if recorded() else _NOTHING


def marked(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, each call of it in a range of that name."""

    @functools.wraps(function)
    def with_range(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with named(name):
            return function(*args, **kwargs)

    return with_range


@contextmanager
def recording() -> Iterator[None]:
    """Let `named` open ranges inside this block; a profiler around or inside it sees them."""
    before = (_Switch.recording, _Switch.nvtx)
    _Switch.recording, _Switch.nvtx = True, torch.cuda.is_available()
    try:
        yield
    finally:
        _Switch.recording, _Switch.nvtx = before
