"""Warp-specialized Gluon kernels on a CPU: each warpgroup a thread, each mbarrier a real one.

Triton interprets its own language on a CPU but not Gluon. What can go wrong in such kernels is
ordering: a buffer overwritten while it is read, a wait on the wrong phase, a product used before it
is done. This stands in for the parts of Gluon that our kernels use and is as adverse as hardware
may be: every step takes a random time, a product reads its operands only when it is waited for, and
a wait that never ends is an error. Programs start in order and a few run at a time, so that those
that wait for each other do.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

BARRIER_TIMEOUT_S = 60.0
LAUNCH_TIMEOUT_S = 300.0
RESIDENT = 3  # programs that run at a time
# The receiver of a signal goes on at once, its sender does not: a later write comes too late.
SIGNAL_DELAY_S = 5e-3
runs_ahead = ""
"""A partition that never waits, as far ahead of the others as that allows."""


class Array(np.ndarray[Any, Any]):
    """A tensor of a kernel: a NumPy array with Triton's cast."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Array:
        return wrap(self.astype(dtype))


def wrap(value: Any) -> Array:
    return np.asarray(value).view(Array)


class Pointer:
    """An address inside a flat array, or one per element of a tile."""

    def __init__(self, memory: np.ndarray[Any, Any], offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def to(self, dtype: Any) -> Pointer:
        return self  # as an integer, for inline assembly


class Descriptor:
    """A TMA descriptor: a tensor in memory that is read block by block."""

    layout = None

    def __init__(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        self.memory = tensor.numpy()
        self.block = tuple(block)
        self.dtype = self.memory.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(block) * self.memory.itemsize)

    def read(self, corner: Sequence[Any]) -> np.ndarray[Any, Any]:
        """The block at a corner, zeros beyond the tensor."""
        block = np.zeros(self.block, self.dtype)
        inside = self._inside(corner)
        block[tuple(map(slice, inside.shape))] = inside
        return block

    def write(self, corner: Sequence[Any], block: np.ndarray[Any, Any]) -> None:
        """Store a block at a corner, clipped to the tensor."""
        inside = self._inside(corner)
        inside[...] = block[tuple(map(slice, inside.shape))]

    def _inside(self, corner: Sequence[Any]) -> np.ndarray[Any, Any]:
        ends = zip(map(int, corner), self.block, strict=True)
        return self.memory[tuple(slice(at, at + size) for at, size in ends)]


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.dtype = memory.dtype

    def index(self, at: Any) -> Any:
        return self.memory[int(at)] if self.memory.dtype == object else Shared(self.memory[int(at)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.transpose(order))

    def load(self, layout: Any) -> Array:
        jitter()
        return wrap(self.memory.copy())

    def store(self, value: Array) -> None:
        jitter()
        self.memory[...] = value


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.expected = self.missing = self.bytes = self.phases = 0

    def arrive(self, arrivals: int = 0, bytes_expected: int = 0, bytes_come: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += bytes_expected - bytes_come
            assert self.missing >= 0, "more arrivals than the barrier was made for"
            if self.missing == 0 and self.bytes == 0:
                self.phases += 1
                self.missing = self.expected
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            over = self.changed.wait_for(lambda: self.phases % 2 != parity % 2, BARRIER_TIMEOUT_S)
        assert over, "timed out on a barrier"


class Pending(threading.local):
    """What a warpgroup has begun; it reads its operands only when it is waited for."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []


_pending = Pending()


class Product:
    """An asynchronous product."""

    def __init__(
        self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> None:
        assert is_async
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.result: Array | None = None
        _pending.products.append(self)

    def finish(self) -> None:
        jitter()
        a, b = (getattr(operand, "memory", operand) for operand in self.operands)
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        self.result = wrap(acc + product if self.use_acc else product)


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(_pending.products) > outstanding:
        _pending.products.pop(0).finish()
    done = tuple(dep.result if isinstance(dep, Product) else dep for dep in deps)
    assert all(result is not None for result in done), "used before it was waited for"
    return done[0] if len(done) == 1 else done


def jitter() -> None:
    """Let a step take a random time."""
    if random.random() < 0.3:
        time.sleep(random.random() * 5e-4)


def copy_to_shared(
    source: Descriptor, corner: Sequence[Any], barrier: Barrier, target: Shared
) -> None:
    def later() -> None:
        jitter()
        target.memory[...] = source.read(corner)
        barrier.arrive(bytes_come=source.block_type.nbytes)

    threading.Thread(target=later).start()


def copy_to_global(target: Descriptor, corner: Sequence[Any], source: Shared) -> None:
    _pending.stores.append(lambda: target.write(corner, source.memory))


def wait_for_stores(outstanding: int) -> None:
    while len(_pending.stores) > outstanding:
        jitter()
        _pending.stores.pop(0)()


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout != "barrier":
        return Shared(np.full(shape, np.nan, dtype))
    return Shared(np.array([Barrier() for _ in range(shape[0])]))


def init(barrier: Barrier, count: int) -> None:
    barrier.expected = barrier.missing = count


def arrive(barrier: Barrier, count: int = 1) -> None:
    jitter()
    barrier.arrive(arrivals=count)


def wait(barrier: Barrier, phase: Any) -> None:
    barrier.wait(int(phase))
    jitter()


def specialize(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    """Run every partition in a thread of its own; `runs_ahead` ends before the others begin."""
    failures: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            assert all(product.result is not None for product in _pending.products)
        except BaseException as failure:
            failures.append(failure)
            _failed.set()  # at once: the other partitions may be waiting for this one

    for ahead in (True, False):
        group = [part for part in parts if (part[0].__name__ == runs_ahead) == ahead]
        threads = [threading.Thread(target=run, args=part) for part in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


_memory_lock = threading.Lock()
_failed = threading.Event()  # set when a program fails, for those that wait for it
_deadline = 0.0


def atomic_add(pointer: Pointer, value: Any, sem: str = "relaxed") -> Array:
    assert not _failed.is_set(), "waiting for a program that has failed"
    assert time.monotonic() < _deadline, "waiting for a program that does not signal"
    jitter()
    with _memory_lock:
        before = wrap(np.copy(pointer.memory[pointer.offset]))
        pointer.memory[pointer.offset] += value
    return before


def atomic_xchg(pointer: Pointer, value: Any, sem: str) -> None:
    """Programs publish their progress this way, so the value must grow."""
    jitter()
    with _memory_lock:
        assert value > pointer.memory[pointer.offset], "progress went backwards"
        pointer.memory[pointer.offset] = value
    time.sleep(SIGNAL_DELAY_S)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offset, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
    pointer.memory[offset[mask]] = value[mask]


def load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Array:
    offset, mask = np.broadcast_arrays(pointer.offset, mask)
    safe = np.where(mask, offset, 0)
    return wrap(np.where(mask, pointer.memory[safe], other))


class Emulator:
    """Runs a Gluon kernel program by program."""

    def __init__(self, kernel: Any) -> None:
        self._program = threading.local()
        self._globals: dict[int, dict[str, Any]] = {}
        self._kernel = self._copy(kernel)

    def launch(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Run all programs; raises what one of them raised."""
        self._programs = programs

        def run(program: int) -> None:
            self._program.id = program
            try:
                self._kernel(*arguments, **constants)
            except BaseException:
                _failed.set()
                raise

        global _deadline
        _deadline = time.monotonic() + LAUNCH_TIMEOUT_S
        _failed.clear()
        with ThreadPoolExecutor(RESIDENT) as pool:
            for _ in pool.map(run, range(programs)):
                pass

    def _copy(self, function: Any) -> Callable[..., Any]:
        """A device function as plain Python, whose globals are the emulator's."""
        plain = function.fn
        key = id(plain.__globals__)
        if key not in self._globals:
            names = self._globals[key] = dict(plain.__globals__)
            for name, value in plain.__globals__.items():
                if hasattr(value, "fn"):
                    names[name] = self._copy(value)
                elif type(value).__name__ == "constexpr":
                    names[name] = value.value
            names |= self._replacements()
        names = self._globals[key]
        return FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)

    def _replacements(self) -> dict[str, Any]:
        def wrapped(function: Callable[..., Any]) -> Callable[..., Array]:
            return lambda *arguments: wrap(function(*arguments))

        numbers = ("minimum", "maximum", "max", "sum", "exp2")
        layouts = ("Slice", "DotOperand", "NVMMADistributed", "NVMMAShared", "SwizzledShared")
        language = SimpleNamespace(
            **{name: wrapped(getattr(np, name)) for name in numbers},
            **{own.__name__: own for own in (store, load, atomic_add, atomic_xchg)},
            **{f"{name}Layout": lambda *_, **__: None for name in layouts},
            constexpr=None,
            int32=np.int64,
            int64=np.int64,
            float32=np.float32,
            program_id=lambda axis: wrap(self._program.id),
            num_programs=lambda axis: wrap(self._programs),
            static_range=range,
            where=lambda condition, a, b: wrap(np.where(condition, a, b).astype(np.float32)),
            arange=lambda start, end, layout: wrap(np.arange(start, end)),
            zeros=lambda shape, dtype, layout: wrap(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: wrap(np.full(shape, value, dtype)),
            convert_layout=lambda x, layout: x,
            allocate_shared_memory=allocate,
            warp_specialize=specialize,
        )
        barriers = SimpleNamespace(
            **{own.__name__: own for own in (init, arrive, wait)},
            expect=lambda barrier, size: barrier.arrive(arrivals=1, bytes_expected=size),
            MBarrierLayout=lambda: "barrier",
        )
        return {
            **{"gl": language, "tl": language, "mbarrier": barriers},
            "tma": SimpleNamespace(store_wait=wait_for_stores),
            **{"async_load": copy_to_shared, "async_store": copy_to_global},
            **{"warpgroup_mma": Product, "warpgroup_mma_wait": warpgroup_mma_wait, "load_v4": load},
            **dict.fromkeys(("fence_async_shared", "warpgroup_barrier"), lambda: None),
            **dict.fromkeys(("gdc_launch_dependents", "gdc_wait"), lambda: None),
            "write_v4": lambda to, x, code: (atomic_add if "add" in code else store)(to, x),
            "approximate": lambda x, name: wrap({"lg2": np.log2, "rcp": np.reciprocal}[name](x)),
        }
