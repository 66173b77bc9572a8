"""A Hopper warpgroup: four consecutive warps that issue one tensor-core instruction (wgmma).

wgmma takes 64 rows of the left operand from registers or shared memory, and the right operand from
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
    """Barriers for a ring of COUNT buffers; a phase completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def key_mask(
    offs_m, block, keys, shift,
    BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """True for the keys of a block that a query attends to.

    The last query's future begins past the last key, so the causal comparison also excludes keys
    past the end.
    """
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if IS_CAUSAL:
        mask = offs_n[None, :] <= (offs_m + shift - block * BLOCK_N)[:, None]
    else:
        mask = (offs_n < keys - block * BLOCK_N)[None, :]
    return mask


@gluon.jit
def begin_tma_store(tile, target, staging, batch, head, start, column, BLOCK_D: gl.constexpr):
    """Start storing 64 rows of a result by TMA, which clips them to the tensor.

    `staging` is shared memory that no other warpgroup uses any more. Storing from registers instead
    would write 16 bytes of a row at a time, half a sector.
    """
    staging.reshape([WG_ROWS, BLOCK_D]).store(tile.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [batch, head, start, column], staging)
