"""One group of warps on Hopper: four warps that multiply 64 rows together, and what they write.

An instruction of the tensor cores there belongs to four neighbouring warps. It takes 64 rows of the
left operand, from registers or shared memory, and the right operand from shared memory.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)
"""Rows of one group."""
PANEL = gl.constexpr(8)
"""Columns of sums that lie together in memory: those that a warp's registers hold side by side."""

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def cells_of(sums, number, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where 64 rows of sums lie that programs add to, one block of them after the other.

    Not row by row but in panels of eight columns: what a warp adds at once, eight columns of eight
    rows, is then 256 bytes in a row instead of eight times 32, and two requests to the L2 instead
    of eight.
    """
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    down = columns // PANEL * (ROWS * PANEL) + columns % PANEL
    return sums + number.to(gl.int64) * (ROWS * COLUMNS) + (rows[:, None] * PANEL + down[None, :])


@gluon.jit
def write(
    tile, target, strides, batch, head, start, length,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of a result, except what lies beyond the tensor."""
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    base = target + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = base + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    inside = (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)
