"""Sums that programs on Hopper add to in memory, tile by tile, through the copy engine.

A thread that adds its own numbers sends the L2 eight bytes at a time. That limits a backward pass
in one walk: 1.3 TB/s is all that was seen of it on an H200, less than the products would allow. The
copy engine takes a tile out of shared memory and adds it in whole lines. It does so by itself: what
was started is known to be added only once it was waited for, and until then its tile must stay.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from lmlab.kernels.hopper_group import ROWS

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

CAN_ADD = hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce")
"""Triton has it, but no name of its language promises that it will."""

# Each copies a number besides: an instruction in a kernel stands in a function of its operand.
ALL_ADDED = gl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;")
ALL_BUT_ONE_ADDED = gl.constexpr(
    "cp.async.bulk.wait_group 1; fence.proxy.async.global; mov.u32 $0, $1;"
)
# What this thread has seen and written, in shared memory and beyond, before what the engine does.
BEFORE_THE_ENGINE = gl.constexpr("fence.proxy.async; mov.u32 $0, $1;")


@builtin
def async_add(target, corner, source, _semantic=None):
    """Start adding a tile of shared memory to one of a tensor; Gluon has no name for it."""
    corner = _semantic._convert_to_ir_values(corner, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, corner, source.handle
    )


@gluon.jit
def wait_for_adds(number, PENDING: gl.constexpr):
    """Until all tiles but the last PENDING that were started are added, for everyone to see.

    Gluon's `tma.store_wait` is over when a tile has been read. `number` is any.
    """
    run(ALL_ADDED if PENDING == 0 else ALL_BUT_ONE_ADDED, number)
    group_barrier()


@gluon.jit
def run(INSTRUCTION: gl.constexpr, number):
    """One instruction of the hardware that Gluon has no name for, in every thread."""
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_adding(share, seat, sums, row, is_first):
    """Put a tile into its seat and start to add it; the first program stores it instead."""
    seat.store(share)
    run(BEFORE_THE_ENGINE, row)
    group_barrier()
    if is_first:
        tma.async_copy_shared_to_global(sums, [row, 0], seat)
    else:
        async_add(sums, [row, 0], seat)


@gluon.jit
def load_sums(sums, row, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """64 rows of what the programs before have added."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    cells = sums + row.to(gl.int64) * COLUMNS + (rows[:, None] * COLUMNS + columns[None, :])
    # Other processors wrote them: `.cg` reads the L2, never an old line of this L1.
    return gl.load(cells, cache_modifier=".cg")


@gluon.jit
def make_seats(sums_tiles, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for tiles that are being added."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS, COLUMNS], sums_tiles.layout)
