"""A Hopper warpgroup: four neighbouring warps that issue one tensor-core instruction (wgmma).

It takes 64 rows of the left operand, from registers or shared memory, and the right operand from
shared memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

WG_ROWS = gl.constexpr(64)
"""Rows of the left operand of one warpgroup."""


@gluon.jit
def store_rows(
    tile, target, strides, batch, head, start, length,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store 64 rows of a result, clipped to the tensor."""
    rows = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    base = target + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = base + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    inside = (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@gluon.jit
def begin_tma_store(tile, target, staging, batch, head, start, BLOCK_D: gl.constexpr):
    """Begin to store 64 rows of a result by TMA, which clips them to the tensor.

    `staging` is shared memory that only this warpgroup still uses. A warpgroup that stores from
    registers writes 16 bytes to a row at a time, half a sector.
    """
    staging.reshape([WG_ROWS, BLOCK_D]).store(tile.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [batch, head, start, 0], staging)


@gluon.jit
def store_by_tma(tile, target, staging, batch, head, start, BLOCK_D: gl.constexpr):
    """Store 64 rows of a result; `staging` is free again at the end."""
    begin_tma_store(tile, target, staging, batch, head, start, BLOCK_D)
    tma.store_wait(0)
