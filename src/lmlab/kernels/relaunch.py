"""Launching a kernel again without asking Triton again which of its compilations is meant.

A call `kernel[grid](...)` has Triton look at every argument, because a compilation holds for
certain types, for pointers that lie on 16 bytes or do not, and for integers that are one or
multiples of 16. Timed on a CPU, where a driver that launches nothing stood for the GPU's, that
takes 18 microseconds a launch, with two or three launches for one forward and backward longer than
a GPU needs for a short sequence. But here all of it follows from the problem, its tiles and the
numbers that are passed, which are the same step after step. So the compilation is remembered by
these, and launched as Triton lets a compiled kernel be launched: `compiled[grid](*all arguments)`,
2 of those microseconds. Pointers are looked at each time; where one does not lie on 16 bytes Triton
is asked as ever.

Descriptors for the copy engine are left to Triton: their kernels are those of long sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNMENT = 16
REMEMBERED_AT_MOST = 4096
"""More than a process meets, unless it goes through ever new shapes."""


@dataclass(frozen=True)
class _Known:
    compiled: CompiledKernel
    launch: Callable[..., None]
    constants: tuple[Any, ...]
    """Compile-time arguments in the order of the kernel's own."""


_known: dict[Hashable, _Known] = {}


def start(
    kernel: Any,
    grid: tuple[int, ...],
    shape: Hashable,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    """`kernel[grid](*tensors, *numbers, **constants)`; returns the compiled kernel if there is one.

    `shape` must determine the types of the tensors, the grid, the constants and the device.
    """
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT:
            return kernel[grid](*tensors, *numbers, **constants)
    key = id(kernel), shape, numbers
    known = _known.get(key)
    if known is None:
        compiled = kernel[grid](*tensors, *numbers, **constants)
        _remember(key, kernel, compiled, grid, len(tensors) + len(numbers), constants)
        return compiled
    known.launch(*tensors, *numbers, *known.constants)
    return known.compiled


def _remember(
    key: Hashable,
    kernel: Any,
    compiled: Any,
    grid: tuple[int, ...],
    given: int,
    constants: dict[str, Any],
) -> None:
    if not isinstance(compiled, CompiledKernel):
        return  # interpreted
    if len(_known) >= REMEMBERED_AT_MOST:
        _known.clear()
    named = tuple(constants[name] for name in kernel.arg_names[given:])
    _known[key] = _Known(compiled, compiled[(*grid, 1, 1)[:3]], named)
