"""The fp32 dQ accumulator in global memory to which the programs of a fused backward add in turn.

It is private to these kernels, so its layout is the one that makes adding cheapest. Tiles are 64 x
64. After a wgmma a thread holds, of every eight columns, two neighbours in one row and in the
eighth row below: these four are adjacent in memory, and one instruction of a warp covers 512
contiguous bytes. A vector reduction (red.v4) adds the four at once instead of with four trips to
the L2. A warpgroup that only accumulates hardly benefits (`bwd_fused`), one that also computes does
(`bwd_fused_d128`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIDE = gl.constexpr(64)
"""Rows and columns of a tile."""


@gluon.jit
def accum_pointers(dq_accum, index, LAYOUT: gl.constexpr):
    """The address of each element of tile `index`, distributed over a warpgroup as LAYOUT."""
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    row_offset = rows // 16 * 128 + rows % 8 * 16 + rows // 8 % 2 * 2
    col_offset = columns // 8 * (SIDE * 8) + columns % 8 // 2 * 4 + columns % 2
    tile = dq_accum + index.to(gl.int64) * (SIDE * SIDE)
    return (tile + (row_offset[:, None] + col_offset[None, :])).to(gl.int64)


@gluon.jit
def red_add_v4(pointers, values):
    """Add to memory; the caller orders programs that add to the same tile."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [pointers, values], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def store_v4(pointers, values):
    """Store to memory."""
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [pointers, values], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def load_v4(pointers):
    """Load from the L2: other SMs wrote it, and this SM's L1 may hold a stale line."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,l,l,l", [pointers], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
