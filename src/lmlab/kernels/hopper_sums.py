"""Sums in memory that programs of a walk add to, one after the other: tiles of 64 by 64.

Where a number of a tile lies is nobody else's business, so it lies where adding is cheapest. After
a product a thread holds, of every eight columns, two neighbours in a row and in the eighth row
below: these four lie together, and what a warp adds at once is 512 bytes in a row. One instruction
adds the four, where one by one there would be four that wait for the way to the L2. A group that
does nothing else hardly feels that (`hopper_once`), one that computes does (`hopper_wide`).
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIDE = gl.constexpr(64)
"""Rows and columns of a tile."""


@gluon.jit
def cells_of(sums, number, LAYOUT: gl.constexpr):
    """The address of each number of a tile, which LAYOUT spreads over a group of four warps."""
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    down = rows // 16 * 128 + rows % 8 * 16 + rows // 8 % 2 * 2
    across = columns // 8 * (SIDE * 8) + columns % 8 // 2 * 4 + columns % 2
    cells = sums + number.to(gl.int64) * (SIDE * SIDE) + (down[:, None] + across[None, :])
    return cells.to(gl.int64)


@gluon.jit
def add_fours(cells, numbers):
    """Add to memory, in no order among those who add at the same time."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [cells, numbers], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def store_fours(cells, numbers):
    """Write to memory."""
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [cells, numbers], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def load_fours(cells):
    """Read from the L2: other processors wrote it, and a line of this L1 may be old."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,l,l,l", [cells], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
