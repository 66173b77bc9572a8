"""Relaunching a compiled kernel without Triton's per-call specialization check.

`kernel[grid](...)` inspects every argument, because a compilation holds for certain types, for
pointers that are or are not aligned to 16 bytes, and for integers that are one or multiples of 16.
That takes about 18 microseconds on the host, and a forward and backward make up to four launches:
longer than a GPU needs for a short sequence. Here all of it follows from the problem, its tiles and
the numbers passed, which repeat step after step. So the compiled kernel is cached by these and
launched directly, `compiled[grid](*arguments)`, which takes 2 microseconds. Pointers are checked
each time; if one is misaligned, Triton decides as usual.

Launches with TMA descriptors are left to Triton: their kernels serve long sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNMENT = 16
MAX_ENTRIES = 4096
"""More than a process uses, unless its shapes keep changing."""


class _Entry(NamedTuple):
    compiled: CompiledKernel
    launch: Callable[..., None]
    constants: tuple[Any, ...]
    """Compile-time arguments in the kernel's order."""


_entries: dict[Hashable, _Entry] = {}


def cached_launch(
    kernel: Any,
    grid: tuple[int, ...],
    shape: Hashable,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    """`kernel[grid](*tensors, *numbers, **constants)`; returns the compiled kernel if there is one.

    `shape` must determine the tensors' types, the grid, the constants and the device.
    """
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT:
            return kernel[grid](*tensors, *numbers, **constants)
    key = id(kernel), shape, numbers
    entry = _entries.get(key)
    if entry is not None:
        entry.launch(*tensors, *numbers, *entry.constants)
        return entry.compiled
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if isinstance(compiled, CompiledKernel):  # not interpreted
        if len(_entries) >= MAX_ENTRIES:
            _entries.clear()
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        ordered = tuple(constants[name] for name in names)
        _entries[key] = _Entry(compiled, compiled[(*grid, 1, 1)[:3]], ordered)
    return compiled
