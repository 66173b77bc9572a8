"""dK and dV on Hopper, warp-specialized: keys and values resident, queries streamed.

Four of the seven products of the two-pass backward; `bwd_dq` has the other three. See `bwd_common`
for the loop.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmlab.kernels.hopper.bwd_common import (
    alloc_dkdv_tiles,
    alloc_stage_barriers,
    dkdv_consumer,
    producer,
    query_blocks,
)
from lmlab.kernels.hopper.warpgroup import WG_ROWS
from lmlab.kernels.tile_ops import tile_of_program


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, scale, batch_heads, heads, l2_heads, queries, keys,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 64 * CONSUMERS rows; streams BLOCK_M queries."""
    BLOCK_N: gl.constexpr = CONSUMERS * WG_ROWS
    key_tiles = (keys + BLOCK_N - 1) // BLOCK_N
    tile, batch, head = tile_of_program(
        gl.program_id(0), key_tiles, batch_heads, heads, l2_heads, False
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    coords = (batch, head, head, tile * BLOCK_N)
    last = (queries + BLOCK_M - 1) // BLOCK_M
    shift = keys - queries
    first, unmasked = query_blocks(tile * BLOCK_N, last, shift, BLOCK_M, BLOCK_N, IS_CAUSAL)
    tiles = alloc_dkdv_tiles((k, v), (q, do), (lse, delta), CONSUMERS, BLOCK_M, BLOCK_D, 1, STAGES)
    barriers = alloc_stage_barriers(STAGES)
    outputs = (dk, dv)
    bounds = (first, unmasked, last, shift)
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (dkdv_consumer, (tiles, barriers, barriers, outputs, coords, bounds, scale,
                         0, BLOCK_D, BLOCK_M, STAGES, 0, IS_CAUSAL, False)),
        (dkdv_consumer, (tiles, barriers, barriers, outputs, coords, bounds, scale,
                         1, BLOCK_D, BLOCK_M, STAGES, 0, IS_CAUSAL, False)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last,
                    CONSUMERS, BLOCK_M, BLOCK_D, 1, STAGES, True, False)),
    ], [4, 1], [240, 24])  # fmt: skip
