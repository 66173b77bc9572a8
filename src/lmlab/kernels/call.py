"""A forward or backward as planned for one set of shapes, strides and types.

It knows which tensors to allocate (`Buffer`) and which kernels to launch on them (`Step`). Planning
takes longer than attention over a short sequence, so calls are planned once and looked up by what
they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlab.kernels.step import Operand, Step
from lmlab.kernels.workspace import semaphores

ALIGNMENT = 16
"""Bytes to which TMA and vector loads require addresses to be aligned."""


class Buffer(NamedTuple):
    """A tensor that a call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Call:
    """Inputs, then results, then scratch memory; and the launches, in order."""

    device: torch.device
    is_aligned: bool
    """Whether the addresses of all inputs are multiples of ALIGNMENT, now and in later calls."""
    operands: list[Operand]
    inputs: int
    results: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    semaphores: int = 0
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> Call:
        """An empty call on these inputs."""
        operands = [
            Operand(place, tuple(x.shape), x.stride(), x.dtype) for place, x in enumerate(inputs)
        ]
        is_aligned = all(x.data_ptr() % ALIGNMENT == 0 for x in inputs)
        return cls(inputs[0].device, is_aligned, operands, len(inputs))

    def result(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Operand:
        """Add a tensor that the call returns; before any scratch."""
        self.results += 1
        return self.scratch(shape, strides, dtype)

    def scratch(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Operand:
        """Add a tensor that only the kernels use."""
        self.buffers.append(Buffer(tuple(shape), tuple(strides), dtype))
        self.operands.append(Operand(len(self.operands), *self.buffers[-1]))
        return self.operands[-1]

    def add_semaphores(self, count: int) -> Operand:
        """Add counters at zero; after all other tensors."""
        self.semaphores = count
        return Operand(len(self.operands), (count,), (1,), torch.int32)

    def add_step(self, kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]) -> None:
        """Add a launch of a number of programs, or of a grid of them."""
        grid = grid if isinstance(grid, tuple) else (grid,)
        self.steps.append(Step(kernel, grid, tuple(arguments), constants, self.is_aligned))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Allocate and launch."""
        device = self.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(*inputs)
        tensors = list(inputs)
        for shape, strides, dtype in self.buffers:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        if self.semaphores:
            tensors.append(semaphores(self.semaphores, device))
        addresses = [x.data_ptr() for x in tensors]
        for step in self.steps:
            step(tensors, addresses)
        return tuple(tensors[self.inputs : self.inputs + self.results])
