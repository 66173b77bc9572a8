"""The kernels on a CPU: Triton's interpreter, chosen per tensor instead of per process.

Triton decides at import, from TRITON_INTERPRET, whether to compile or interpret all decorated
functions, including its own library (`tl.max`, `tl.sum`), so a process could run kernels on a GPU
or on a CPU, not on both. Both are needed: tests compare the two, and kernels must work on CPU
tensors and without a GPU. So an interpreted copy of a kernel is made when it is first needed: a
copy of its module's globals in which every kernel function is interpreted. During a launch, the two
library functions that the kernels use are interpreted as well.

The interpreter is for correctness only: it runs one program after the other in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

DECORATED = (JITFunction, InterpretedFunction)
"""What `triton.jit` returns: the second if TRITON_INTERPRET was set at import."""
LIBRARY_FUNCTIONS = ("max", "sum")
"""Functions of Triton's library that the kernels call and that are decorated like kernels."""


def kernel_for(kernel: Any, device: torch.device) -> Any:
    """The kernel for a device: compiled on a GPU, interpreted on a CPU."""
    return kernel if device.type == "cuda" else interpreted(kernel)


@cache
def interpreted(kernel: Any) -> _InterpretedKernel:
    """The interpreted copy of a kernel."""
    return _InterpretedKernel(_Copies().of(kernel))


class _InterpretedKernel:
    """Launches like a kernel, `kernel[grid](...)`; GPU launch options are ignored."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            with _interpreted_library():
                self._function[grid](*arguments, **options)

        return launch


class _Inlined(InterpretedFunction):
    """A function called by a kernel, whose launch has already installed the interpreter.

    Triton would install it again for every call, which takes longer than the call itself.
    """

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.rewrite()(*arguments, **options)


class _Copies:
    """Interpreted copies of kernel functions, which call each other instead of the originals."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def of(self, function: Any) -> Any:
        """The copy of one function."""
        if function not in self._functions:
            plain = function.fn
            names = self._globals_of(plain)
            copy = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
            copy.__annotations__ = plain.__annotations__
            self._functions[function] = _Inlined(copy)
        return self._functions[function]

    def _globals_of(self, plain: Any) -> dict[str, Any]:
        key = id(plain.__globals__)
        if key not in self._globals:
            names = self._globals[key] = dict(plain.__globals__)  # first: functions may recurse
            for name, value in plain.__globals__.items():
                if isinstance(value, DECORATED):
                    names[name] = self.of(value)
        return self._globals[key]


@contextmanager
def _interpreted_library() -> Iterator[None]:
    """Interpret the functions of Triton's library that kernels use, within the block.

    Triton itself would install the interpreter at each call of such a function and never remove it,
    so this process could no longer compile anything.
    """
    before = {name: getattr(tl, name) for name in LIBRARY_FUNCTIONS}
    patch_tensor = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = _with_loop_bounds(patch_tensor)
    scope = interpreter._patch_lang(tl.max.fn)
    try:
        for name, function in before.items():
            setattr(tl, name, _Inlined(function.fn))
        yield
    finally:
        for name, function in before.items():
            setattr(tl, name, function)
        scope.restore()
        interpreter._patch_lang_tensor = patch_tensor


def _with_loop_bounds(patch_tensor: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Make scalars, which the interpreter keeps as arrays of one number, usable as loop bounds.

    Triton 3.6 converts them with `int(array)`, which NumPy no longer allows.
    """

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    return patch
