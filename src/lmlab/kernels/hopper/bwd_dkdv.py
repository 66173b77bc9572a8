"""dK and dV on Hopper, warp-specialized: keys and values resident, queries streamed.

Four of the seven products of the two-pass backward; `bwd_dq` has the other three. S, P, dP and dS
are transposed, keys down and queries across, so that dV = P^T dO and dK = dS^T Q are plain products
whose left operand is already in registers. See `bwd_common` for the pipeline.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper.bwd_common import (
    alloc_barriers,
    alloc_dkdv_tiles,
    producer,
    query_blocks,
    start_s_and_dp,
    store_dkdv,
)
from lmlab.kernels.hopper.warpgroup import WG_ROWS
from lmlab.kernels.tile_ops import tile_of_program

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def query_loop(
    grads, tiles, barriers, offs_n, loop_start, first, last, shift, scale_log2,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of 64 keys over query blocks [first, last)."""
    _, _, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, empty = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dk, dv = grads
    for block in range(first, last):
        step = block - loop_start
        stage = step % STAGES
        s, dp = start_s_and_dp(
            tiles, barriers, step, WG, BLOCK_D, BLOCK_M, STAGES, NEEDS_DK, S_LAYOUT
        )
        lse_vec = lse_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT) * LOG2E
        s = warpgroup_mma_wait(1 if NEEDS_DK else 0, deps=[s])
        p = gl.exp2(s * scale_log2 - lse_vec[None, :])
        if MASKED:
            offs_m = block * BLOCK_M + gl.arange(0, BLOCK_M, COL_LAYOUT)
            p = gl.where(offs_n[:, None] <= offs_m[None, :] + shift, p, 0.0)
        if NEEDS_DV:
            operand = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT)
            do_tile = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
            dv = warpgroup_mma(operand, do_tile, dv, is_async=True)
        if NEEDS_DK:
            delta_vec = delta_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT)
            dp = warpgroup_mma_wait(1 if NEEDS_DV else 0, deps=[dp])
            ds = p * (dp - delta_vec[None, :])
            operand = gl.convert_layout(ds.to(q_tiles.dtype), P_LAYOUT)
            q_tile = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
            dk = warpgroup_mma(operand, q_tile, dk, is_async=True)
        if NEEDS_DK and NEEDS_DV:
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        elif NEEDS_DK:
            dk = warpgroup_mma_wait(0, deps=[dk])
        else:
            dv = warpgroup_mma_wait(0, deps=[dv])
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def consumer(
    tiles, barriers, outputs, coords, bounds, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys: one warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    start = start + WG * WG_ROWS
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    mbarrier.wait(barriers[0], 0)
    if IS_CAUSAL:
        grads = query_loop(
            grads, tiles, barriers, offs_n, first, first, unmasked, shift, scale * LOG2E,
            WG, BLOCK_D, BLOCK_M, STAGES, True, NEEDS_DK, NEEDS_DV, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    grads = query_loop(
        grads, tiles, barriers, offs_n, first, unmasked, last, shift, scale * LOG2E,
        WG, BLOCK_D, BLOCK_M, STAGES, False, NEEDS_DK, NEEDS_DV, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    staging = tiles[1].index(WG)
    store_dkdv(grads, outputs, staging, batch, head, start, scale, BLOCK_D, NEEDS_DK, NEEDS_DV)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, scale, batch_heads, heads, l2_heads, queries, keys,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 64 * CONSUMERS rows; streams BLOCK_M queries."""
    BLOCK_N: gl.constexpr = CONSUMERS * WG_ROWS
    key_tiles = (keys + BLOCK_N - 1) // BLOCK_N
    tile, batch, head = tile_of_program(
        gl.program_id(0), key_tiles, batch_heads, heads, l2_heads, False
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    coords = (batch, head, head, tile * BLOCK_N)
    first, unmasked, last = query_blocks(tile, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    tiles = alloc_dkdv_tiles(
        (k, v), (q, do), (lse, delta), CONSUMERS, BLOCK_M, BLOCK_D, STAGES, NEEDS_DK
    )
    barriers = alloc_barriers(CONSUMERS, STAGES)
    outputs = (dk, dv)
    bounds = (first, unmasked, last, keys - queries)
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (consumer, (tiles, barriers, outputs, coords, bounds, scale,
                    0, BLOCK_D, BLOCK_M, STAGES, IS_CAUSAL, NEEDS_DK, NEEDS_DV)),
        (consumer, (tiles, barriers, outputs, coords, bounds, scale,
                    1, BLOCK_D, BLOCK_M, STAGES, IS_CAUSAL, NEEDS_DK, NEEDS_DV)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last,
                    CONSUMERS, BLOCK_M, STAGES, True, False, NEEDS_DK)),
    ], [4, 1], [240, 24])  # fmt: skip
