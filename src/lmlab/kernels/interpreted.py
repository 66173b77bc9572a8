"""The same kernels on a CPU: Triton's interpreter, chosen by the tensor and not by the process.

Triton decides at import, from TRITON_INTERPRET, whether a decorated function will be compiled or
interpreted, and its own library (`tl.max`, `tl.sum`) is decorated in the same moment. A process
that imported Triton without the variable could then never run a kernel on a CPU, and one that set
it never on a GPU. Both are wanted here: a test compares the two, and on a machine without a GPU a
kernel must run wherever a user calls it. So an interpreted twin is made of a compiled kernel when
it is first needed: a copy of its module's names in which every kernel function is interpreted,
and, for the time of a launch, the two library functions that the kernels use.

The interpreter is there for correctness. It runs one program after the other with NumPy, a
thousand times slower than a GPU, and its time says nothing about the kernel.
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
"""What `triton.jit` makes of a function: the second if TRITON_INTERPRET was set at import."""

LIBRARY_FUNCTIONS = ("max", "sum")
"""Functions of Triton's library that the kernels call and that are decorated as they are."""


def kernel_for(kernel: Any, device: torch.device) -> Any:
    """The kernel as it runs on that device: compiled on a GPU, interpreted on a CPU."""
    return kernel if device.type == "cuda" else interpreted(kernel)


@cache
def interpreted(kernel: Any) -> _InterpretedKernel:
    """The interpreted twin of a kernel."""
    return _InterpretedKernel(_Twins().of(kernel))


class _InterpretedKernel:
    """Launches like a kernel, `kernel[grid](...)`; the launch options of a GPU mean nothing."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            with _library_interpreted():
                self._function[grid](*arguments, **options)

        return launch


class _Inlined(InterpretedFunction):
    """A function that a kernel calls; the launch has already put the interpreter in place.

    Triton puts it in place again for every such call, which takes longer than the call itself.
    """

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.rewrite()(*arguments, **options)


class _Twins:
    """Interpreted copies of kernel functions, which call each other and not the originals."""

    def __init__(self) -> None:
        self._functions: dict[Any, Any] = {}
        self._worlds: dict[int, dict[str, Any]] = {}

    def of(self, function: Any) -> Any:
        """The copy of one function."""
        if function not in self._functions:
            plain = function.fn
            world = self._world(plain.__globals__)
            copy = FunctionType(plain.__code__, world, plain.__name__, plain.__defaults__)
            copy.__annotations__ = plain.__annotations__
            self._functions[function] = _Inlined(copy)
        return self._functions[function]

    def _world(self, names: dict[str, Any]) -> dict[str, Any]:
        """A module's names as the copies see them."""
        if id(names) not in self._worlds:
            world = self._worlds[id(names)] = dict(names)  # known first: functions may recurse
            for name, value in names.items():
                if isinstance(value, DECORATED):
                    world[name] = self.of(value)
        return self._worlds[id(names)]


@contextmanager
def _library_interpreted() -> Iterator[None]:
    """For the block, what kernels use of Triton's library is interpreted too.

    Triton would put the interpreter in place at each call of such a function and leave it there,
    and nothing could be compiled in this process any more.
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
    """A scalar of the interpreter is an array of one number, and a loop bound is read off it.

    Triton 3.6 reads it with `int(array)`, which NumPy has since given up.
    """

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    return patch
