"""A Hopper warpgroup: four neighbouring warps that issue one tensor-core instruction (wgmma).

It takes 64 rows of the left operand, from registers or shared memory, and the right operand from
shared memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

WG_ROWS = gl.constexpr(64)
"""Rows of the left operand of one warpgroup."""


@gluon.jit
def alloc_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of a ring of buffers; a phase ends with so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def key_mask(
    offs_m, block, keys, shift,
    BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """True for keys of a block that are in a query's past or, without causal mask, exist.

    The future of the last query begins past the last key, so the causal comparison also excludes
    keys that do not exist.
    """
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if IS_CAUSAL:
        mask = offs_n[None, :] <= (offs_m + shift - block * BLOCK_N)[:, None]
    else:
        mask = (offs_n < keys - block * BLOCK_N)[None, :]
    return mask


@gluon.jit
def begin_tma_store(tile, target, staging, batch, head, start, column, BLOCK_D: gl.constexpr):
    """Begin to store 64 rows of a result by TMA, which clips them to the tensor.

    `staging` is shared memory that only this warpgroup still uses. A warpgroup that stores from
    registers writes 16 bytes to a row at a time, half a sector.
    """
    staging.reshape([WG_ROWS, BLOCK_D]).store(tile.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [batch, head, start, column], staging)
