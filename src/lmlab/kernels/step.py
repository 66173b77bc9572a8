"""A planned kernel launch, repeated without going through Triton again.

`kernel[grid](...)` inspects every argument, because Triton specializes a kernel for types, for
pointers aligned to 16 bytes, and for integers that are 1 or multiples of 16; it also re-encodes
each TMA descriptor. That takes the host 20 to 150 microseconds, longer than the GPU needs for a
short sequence. But all of it follows from shapes and strides, which repeat step after step. So a
`Step` holds everything about a launch except the tensors, which it refers to by their index in a
list (`Operand`). The first launch goes through Triton, which compiles the kernel. After that,
`DirectLaunches` passes the parameters straight to the CUDA driver: only pointers change, including
the address inside each TMA descriptor.

Triton passes a kernel its non-constant arguments in order (tuples flattened; a descriptor as the
128-byte map, its shape and its strides), followed by two scratch pointers, unused here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from lmlab.kernels.interpreted import kernel_for

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: nothing has run in this thread yet."""
MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Of a CUtensorMap."""
MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""
PROMOTE_L2_128B = 2
C_TYPES = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a launch: its index in the list of tensors, and its layout."""

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The argument that Triton takes: the tensor."""
        return tensors[self.index]


@dataclass(frozen=True)
class Tiled:
    """An operand that a kernel reads or writes by TMA, in tiles of `block`."""

    operand: Operand
    strides: tuple[int, ...]
    """As TMA accepts them."""
    block: tuple[int, ...]
    descriptor: Any
    """Triton's or Gluon's class of descriptors."""
    layout: Any = None

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The argument that Triton takes: a TMA descriptor of the tensor."""
        tensor, shape = self.operand.of(tensors), list(self.operand.shape)
        options = () if self.layout is None else (self.layout,)
        return self.descriptor(tensor, shape, list(self.strides), list(self.block), *options)


@dataclass(eq=False)
class Step:
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """Operands, and numbers as they are."""
    constants: dict[str, Any]
    """Compile-time arguments and launch options."""
    compiled: Any = field(default=None, init=False)
    """The kernel after the first launch; None if interpreted."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch through Triton, which compiles the kernel if it is new."""
        kernel = kernel_for(self.kernel, tensors[0].device)
        given = [x.of(tensors) if isinstance(x, Operand | Tiled) else x for x in self.arguments]
        # Triton 3.9 announces that fused multiply-adds will no longer be the default.
        self.compiled = kernel[self.grid](*given, enable_fp_fusion=True, **self.constants)


def can_repeat(compiled: Any, device: torch.device) -> bool:
    """Whether `DirectLaunches` supports all of a kernel's parameters and launch options."""
    if device.type != "cuda" or not isinstance(compiled, CompiledKernel):
        return False
    meta = compiled.metadata
    scratch = meta.global_scratch_size or meta.profile_scratch_size
    options = meta.launch_cooperative_grid or meta.num_ctas != 1
    types = [kind for kind in compiled.src.signature.values() if str(kind).startswith("tensordesc")]
    return not scratch and not options and len(types) == len(meta.tensordesc_meta or ())


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value of integers."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int * 16))


PDL = LaunchAttribute(6, 0, (1,))
"""Programmatic dependent launch: start once all programs of the launch before allow it."""


class DirectLaunches:
    """The compiled kernels of a list of steps, with their parameters prepared in memory."""

    def __init__(self, steps: Sequence[Step], operands: int, device: int) -> None:
        self._pointers: Any = (ctypes.c_uint64 * operands)()
        self._maps: dict[tuple[Any, ...], TensorMap] = {}
        self._memory: list[Any] = []
        self.device = device
        # Threads share the parameters, which the driver copies during each launch.
        self._lock = threading.Lock()
        self._launches = [self._prepare(step) for step in steps]

    def __call__(self, addresses: list[int]) -> None:
        """Launch on the tensors at these addresses, on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self._lock:
            self._pointers[:] = addresses
            for tensor_map in self._maps.values():
                address = addresses[tensor_map.index]
                if tensor_map.address != address:
                    tensor_map.move(address)
            for config, launch in self._launches:
                config.stream = stream
                status = launch()
                if status == NO_CONTEXT:  # the first launch of this thread
                    bind_context(self.device)
                    status = launch()
                if status:
                    raise RuntimeError(f"flash: CUDA error {status} at a launch")

    def _prepare(self, step: Step) -> tuple[LaunchConfig, Callable[[], int]]:
        """A launch without arguments, because converting them would take longer than the rest."""
        compiled = step.compiled
        metadata = iter(compiled.metadata.tensordesc_meta or ())
        kinds = list(compiled.src.signature.values())[: len(step.arguments)]
        parameters = [
            parameter
            for kind, argument in zip(kinds, step.arguments, strict=True)
            for parameter in self._encode(kind, argument, metadata)
        ] + [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        array = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        self._memory.append(parameters)
        grid, width = (*step.grid, 1, 1)[:3], 32 * compiled.metadata.num_warps
        config = LaunchConfig(grid, (width, 1, 1), compiled.metadata.shared)
        if compiled.metadata.launch_pdl:
            config.attributes, config.count = ctypes.addressof(PDL), 1
        function = ctypes.c_void_p(compiled.function)
        return config, partial(cuda().cuLaunchKernelEx, ctypes.byref(config), function, array, None)

    def _encode(self, kind: Any, argument: Any, metadata: Iterator[Any]) -> Iterator[Any]:
        """The kernel parameters that one argument expands to."""
        if kind == "constexpr":
            return
        if isinstance(kind, tuple):
            for inner, value in zip(kind, argument, strict=True):
                yield from self._encode(inner, value, metadata)
        elif isinstance(argument, Tiled):
            layout = next(metadata)
            key = argument.operand.index, *layout["block_size"], layout["swizzle"]
            yield self._maps.setdefault(key, TensorMap(argument, layout)).buffer
            yield from map(ctypes.c_int32, argument.operand.shape)
            yield from map(ctypes.c_int64, argument.strides)
        elif isinstance(argument, Operand):
            yield ctypes.c_uint64.from_buffer(self._pointers, 8 * argument.index)
        else:
            yield C_TYPES[kind](argument)


class TensorMap:
    """A TMA descriptor that can be pointed at another tensor of the same layout."""

    def __init__(self, tiled: Tiled, metadata: dict[str, Any]) -> None:
        self._memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        offset = -ctypes.addressof(self._memory) % MAP_ALIGNMENT
        self.buffer = (ctypes.c_char * MAP_BYTES).from_buffer(self._memory, offset)
        self._tiled, self._metadata = tiled, metadata
        self._replace = partial(cuda().cuTensorMapReplaceAddress, self.buffer)
        self.index, self.address = tiled.operand.index, 0

    def move(self, address: int) -> None:
        """Point the descriptor at the tensor at this address."""
        if status := self._replace(address) if self.address else self._create(address):
            raise RuntimeError(f"flash: CUDA error {status} in a TMA descriptor")
        self.address = address

    def _create(self, address: int) -> int:
        operand, rank = self._tiled.operand, len(self._tiled.block)
        bytes_per_step = [step * operand.dtype.itemsize for step in self._tiled.strides[-2::-1]]
        status: int = cuda().cuTensorMapEncodeTiled(
            self.buffer, MAP_TYPES[operand.dtype], rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*operand.shape[::-1]),
            (ctypes.c_uint64 * (rank - 1))(*bytes_per_step),
            (ctypes.c_uint32 * rank)(*self._metadata["block_size"][::-1]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0, self._metadata["swizzle"], PROMOTE_L2_128B, 0,
        )  # fmt: skip
        return status


@cache
def cuda() -> Any:
    """The CUDA driver; calls hold the GIL, because releasing it would take longer than they do."""
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def bind_context(device: int) -> None:
    """Make PyTorch's context current in this thread, as PyTorch's own first launch would."""
    context = ctypes.c_void_p()
    if status := (
        cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda().cuCtxSetCurrent(context)
    ):
        raise RuntimeError(f"flash: CUDA error {status} when binding the context")
