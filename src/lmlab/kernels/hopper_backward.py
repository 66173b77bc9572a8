"""The backward kernels for Hopper with their warps specialised: one loads, two compute.

PLACEHOLDER
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lmlab.kernels.tiles import place

ROWS = gl.constexpr(64)
"""Rows of one group of warps: what one instruction multiplies."""
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def produce(
    kept, walked, rows, kept_tiles, walked_tiles, row_tiles, barriers, where, first, last,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the two kept tiles once, then the walked ones and their rows of numbers."""
    kept_ready, ready, free = barriers
    batch, head, start = where
    size: gl.constexpr = 2 * CONSUMERS * kept[0].block_type.nbytes
    mbarrier.expect(kept_ready, size)
    for which in gl.static_range(CONSUMERS):
        corner = [batch, head, start + which * ROWS, 0]
        tma.async_copy_global_to_shared(kept[0], corner, kept_ready, kept_tiles[0].index(which))
        tma.async_copy_global_to_shared(kept[1], corner, kept_ready, kept_tiles[1].index(which))
    for block in range(first, last):
        turn = block - first
        slot = turn % STAGES
        corner = [batch, head, block * WALKED, 0]
        mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
        for side in gl.static_range(2):
            pass
