"""Warp-specialised kernels on a CPU: each group of warps a thread, each barrier a real one.

Triton interprets its own language on a CPU but not Gluon, in which groups of warps are written out
one by one. What can go wrong there is order: a slot overwritten while it is read, a barrier waited
for in the wrong phase, a product used before it is done. This stands in for the parts of Gluon that
our kernels use, and is as unkind as the hardware may be: every step takes a random time, a product
reads its operands only at the moment that somebody waits for it, and who waits too long has hung.
Programs start in order and a few of them run at a time, so that those that wait for each other do.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

PATIENCE_S = 20.0
LAUNCH_S = 120.0
"""Longest time from a launch to the last word of a program."""
RESIDENT = 3
"""Programs that run at a time."""
TOLD_S = 5e-3
"""Who was told goes on at once, who told does not: what it has still to write comes too late."""


class Array(np.ndarray[Any, Any]):
    """A tensor of a kernel: NumPy's, with Triton's names for what it lacks."""

    def to(self, dtype: Any) -> Array:
        return wrap(self.astype(dtype))


def wrap(value: Any) -> Array:
    return np.asarray(value).view(Array)


class Pointer:
    """An address inside a flat array, or one for each element of a tile."""

    def __init__(self, memory: np.ndarray[Any, Any], offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def to(self, dtype: Any) -> Pointer:
        """As a number for the assembler."""
        return self


class Tensor:
    """A tensor in memory that is read block by block: a tensor descriptor."""

    layout = None

    def __init__(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        self.memory = tensor.numpy()
        self.block = tuple(block)
        self.dtype = self.memory.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(block) * self.memory.itemsize)

    def read(self, corner: Sequence[Any]) -> np.ndarray[Any, Any]:
        """The block at a corner, zeros beyond the tensor."""
        block = np.zeros(self.block, self.dtype)
        inside = self.memory[
            tuple(
                slice(int(at), int(at) + size) for at, size in zip(corner, self.block, strict=True)
            )
        ]
        block[tuple(slice(0, size) for size in inside.shape)] = inside
        return block


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

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.memory[(slice(None),) * dim + (slice(start, start + length),)])

    def load(self, layout: Any) -> Array:
        dawdle()
        return wrap(self.memory.copy())

    def store(self, value: Array) -> None:
        dawdle()
        self.memory[...] = value


class Barrier:
    """Counts arrivals and bytes; a phase is over when all of both have come."""

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
            over = self.changed.wait_for(lambda: self.phases % 2 != int(parity) % 2, PATIENCE_S)
        assert over, "waited for a barrier that nobody arrives at"


class Product:
    """A product under way; its operands are read when it is waited for, not before."""

    pending = threading.local()

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.result: Array | None = None
        self.queue().append(self)

    @classmethod
    def queue(cls) -> list[Product]:
        if not hasattr(cls.pending, "queue"):
            cls.pending.queue = []
        queue: list[Product] = cls.pending.queue
        return queue

    def finish(self) -> None:
        dawdle()
        a, b = (getattr(operand, "memory", operand) for operand in self.operands)
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        self.result = wrap(acc + product if self.use_acc else product)


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
) -> Product:
    assert is_async
    return Product(a, b, acc, use_acc)


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    queue = Product.queue()
    while len(queue) > outstanding:
        queue.pop(0).finish()
    done = tuple(dep.result if isinstance(dep, Product) else dep for dep in deps)
    assert all(result is not None for result in done), "used before it was waited for"
    return done[0] if len(done) == 1 else done


def dawdle() -> None:
    """Any step may take any time."""
    if random.random() < 0.3:
        time.sleep(random.random() * 5e-4)


def copy_to_shared(source: Tensor, corner: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    def later() -> None:
        dawdle()
        target.memory[...] = source.read(corner)
        barrier.arrive(bytes_come=source.block_type.nbytes)

    threading.Thread(target=later).start()


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout != "barrier":
        return Shared(np.full(shape, np.nan, dtype))
    if list(shape) == [1]:
        return Barrier()
    barriers = np.empty(shape[0], object)
    for at in range(shape[0]):
        barriers[at] = Barrier()
    return Shared(barriers)


def init(barrier: Barrier, count: int) -> None:
    barrier.expected = barrier.missing = count


def arrive(barrier: Barrier, count: int = 1) -> None:
    dawdle()
    barrier.arrive(arrivals=count)


def wait(barrier: Barrier, phase: Any) -> None:
    barrier.wait(int(phase))
    dawdle()


def specialize(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    """Every part in a thread of its own, until all are done."""
    failures: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            assert not Product.queue() or all(p.result is not None for p in Product.queue())
        except BaseException as failure:
            failures.append(failure)
            _broken.set()  # now, not once the other parts are done: they may wait for this one

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


_one_at_a_time = threading.Lock()
_broken = threading.Event()
"""Set by a program that failed, for those that wait for it."""
_deadline = 0.0


def atomic_add(pointer: Pointer, value: Any, sem: str) -> Array:
    assert not _broken.is_set(), "waits for a program that has failed"
    assert time.monotonic() < _deadline, "waits for a program that tells nothing"
    dawdle()
    with _one_at_a_time:
        before = wrap(np.copy(pointer.memory[pointer.offset]))
        pointer.memory[pointer.offset] += value
    return before


def atomic_xchg(pointer: Pointer, value: Any, sem: str) -> None:
    """What programs tell each other this way is how far they have come."""
    dawdle()
    with _one_at_a_time:
        assert value > pointer.memory[pointer.offset], "progress that goes back"
        pointer.memory[pointer.offset] = value
    time.sleep(TOLD_S)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offset, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
    pointer.memory[offset[mask]] = value[mask]


def load(pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Array:
    offset, mask = np.broadcast_arrays(pointer.offset, mask)
    safe = np.where(mask, offset, 0)
    return wrap(np.where(mask, pointer.memory[safe], other))


class Emulator:
    """Runs a Gluon kernel program by program."""

    def __init__(self, kernel: Any) -> None:
        self._program = threading.local()
        self._worlds: dict[int, dict[str, Any]] = {}
        self._kernel = self._copy(kernel)

    def launch(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Run all programs; raises what one of them raised."""

        def run(program: int) -> None:
            self._program.id = program
            try:
                self._kernel(*arguments, **constants)
            except BaseException:
                _broken.set()
                raise

        global _deadline
        _deadline = time.monotonic() + LAUNCH_S
        _broken.clear()
        with ThreadPoolExecutor(RESIDENT) as pool:
            for _ in pool.map(run, range(programs)):
                pass

    def _copy(self, function: Any) -> Callable[..., Any]:
        plain = function.fn
        world = self._world(plain.__globals__)
        return FunctionType(plain.__code__, world, plain.__name__, plain.__defaults__)

    def _world(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self._worlds:
            world = self._worlds[id(names)] = dict(names)
            for name, value in names.items():
                if hasattr(value, "fn"):
                    world[name] = self._copy(value)
                elif type(value).__name__ == "constexpr":
                    world[name] = value.value
            world |= self._stand_ins()
        return self._worlds[id(names)]

    def _stand_ins(self) -> dict[str, Any]:
        language = SimpleNamespace(
            constexpr=None,
            int32=np.int64,
            int64=np.int64,
            float32=np.float32,
            program_id=lambda axis: wrap(self._program.id),
            static_range=range,
            minimum=lambda a, b: wrap(np.minimum(a, b)),
            maximum=lambda a, b: wrap(np.maximum(a, b)),
            max=lambda x, axis: wrap(np.max(x, axis)),
            sum=lambda x, axis: wrap(np.sum(x, axis)),
            exp2=lambda x: wrap(np.exp2(x)),
            log2=lambda x: wrap(np.log2(x)),
            where=lambda condition, a, b: wrap(np.where(condition, a, b).astype(np.float32)),
            arange=lambda start, end, layout: wrap(np.arange(start, end)),
            zeros=lambda shape, dtype, layout: wrap(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: wrap(np.full(shape, value, dtype)),
            convert_layout=lambda x, layout: x,
            store=store,
            load=load,
            atomic_add=atomic_add,
            atomic_xchg=atomic_xchg,
            allocate_shared_memory=allocate,
            warp_specialize=specialize,
            SliceLayout=lambda *_: None,
            DotOperandLayout=lambda *_: None,
            NVMMADistributedLayout=lambda *_: None,
            NVMMASharedLayout=lambda **_: None,
            BlockedLayout=lambda *_: None,
        )
        barriers = SimpleNamespace(
            init=init,
            arrive=arrive,
            wait=wait,
            expect=lambda barrier, size: barrier.arrive(arrivals=1, bytes_expected=size),
            MBarrierLayout=lambda: "barrier",
        )
        return {
            "gl": language,
            "tl": language,
            "mbarrier": barriers,
            "tma": SimpleNamespace(async_copy_global_to_shared=copy_to_shared),
            "warpgroup_mma": warpgroup_mma,
            "warpgroup_mma_wait": warpgroup_mma_wait,
            "fence_async_shared": lambda: None,
            "group_barrier": lambda: None,
            "add_fours": partial(atomic_add, sem="relaxed"),
            "store_fours": store,
            "load_fours": load,
        }
