"""A forward or backward, planned for one set of shapes, strides and types.

A call lists the tensors to allocate (`Buffer`) and the kernels to launch on them (`Step`). Planning
takes longer than attention over a short sequence, so calls are planned once and then cached by
everything they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlab.kernels.step import DirectLaunches, Operand, Step, can_repeat
from lmlab.kernels.workspace import semaphores

ALIGNMENT = 16
"""Bytes to which TMA and vector loads require addresses to be aligned."""
PAGE = 512
"""Bytes to which the CUDA allocator aligns tensors, and this module scratch memory."""
_empty_cuda: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
"""`torch.empty_strided` on the current GPU in half the time, made for compiled code."""


class Buffer(NamedTuple):
    """A tensor that a call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Call:
    """The tensors (inputs, results, scratch, semaphores, in that order) and the launches."""

    device: torch.device
    is_aligned: bool
    """Whether the addresses of all inputs are multiples of ALIGNMENT, now and in later calls."""
    operands: list[Operand]
    results: list[Buffer] = field(default_factory=list)
    scratches: list[Buffer] = field(default_factory=list)
    semaphores: int = 0
    steps: list[Step] = field(default_factory=list)
    backwards: dict[Any, Call] = field(default_factory=dict, init=False)
    """Of a forward: the calls that followed it, by the layout of grad_o."""
    _direct: DirectLaunches | None = field(default=None, init=False)
    _offsets: list[int] = field(default_factory=list, init=False)
    """Where each scratch tensor begins in the memory of all, and where the last one ends."""

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> Call:
        """A call on these inputs, without results or launches yet."""
        operands = [
            Operand(place, tuple(x.shape), x.stride(), x.dtype) for place, x in enumerate(inputs)
        ]
        is_aligned = all(x.data_ptr() % ALIGNMENT == 0 for x in inputs)
        return cls(inputs[0].device, is_aligned, operands)

    def result(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Operand:
        """Add a tensor that the call returns; results must be added before any scratch."""
        return self._add(self.results, Buffer(tuple(shape), tuple(strides), dtype))

    def scratch(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Operand:
        """Add a tensor that only the kernels use."""
        return self._add(self.scratches, Buffer(tuple(shape), tuple(strides), dtype))

    def _add(self, buffers: list[Buffer], buffer: Buffer) -> Operand:
        buffers.append(buffer)
        self.operands.append(Operand(len(self.operands), *buffer))
        return self.operands[-1]

    def add_semaphores(self, count: int) -> Operand:
        """Add zeroed counters; must come after all other tensors."""
        self.semaphores = count
        return self._add([], Buffer((count,), (1,), torch.int32))

    def add_step(self, kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]) -> None:
        """Add a launch; `grid` is a number of programs or a tuple."""
        grid = grid if isinstance(grid, tuple) else (grid,)
        self.steps.append(Step(kernel, grid, tuple(arguments), constants))

    def __call__(self, inputs: Sequence[Tensor], addresses: list[int]) -> list[Tensor]:
        """Allocate and launch. `addresses` are the inputs' and are extended in place; a launch
        through Triton does not need them."""
        direct = self._direct
        if direct is None or direct.device != torch._C._cuda_getDevice():
            return self._call_slowly(inputs, addresses)
        results = [_empty_cuda(*buffer) for buffer in self.results]
        addresses += [x.data_ptr() for x in results]
        if self.scratches:
            *offsets, size = self._offsets
            memory = _empty_cuda((size,), (1,), torch.uint8)
            start = memory.data_ptr()
            addresses += [start + offset for offset in offsets]
        if self.semaphores:
            counters = semaphores(self.semaphores, self.device)  # held until launched
            addresses.append(counters.data_ptr())
        direct(addresses)
        return results

    def _call_slowly(self, inputs: Sequence[Tensor], addresses: list[int]) -> list[Tensor]:
        """Call on a device that is not the current one; or through Triton: the first time, and
        every time if a launch cannot be repeated directly."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:
            if self._direct is not None:
                return self(inputs, addresses)
            results, scratches = (
                [torch.empty_strided(*x[:2], dtype=x.dtype, device=self.device) for x in buffers]
                for buffers in (self.results, self.scratches)
            )
            tensors = [*inputs, *results, *scratches]
            if self.semaphores:
                tensors.append(semaphores(self.semaphores, self.device))
            for step in self.steps:
                step(tensors)
        if self.is_aligned and all(can_repeat(step.compiled, self.device) for step in self.steps):
            sizes = (x.untyped_storage().nbytes() + PAGE - 1 for x in scratches)
            self._offsets = [0, *accumulate(size // PAGE * PAGE for size in sizes)]
            self._direct = DirectLaunches(self.steps, len(tensors), self.device.index)
        return results
