"""dQ on Hopper, warp-specialized: queries and dO resident, keys and values streamed.

Three of the seven products of the two-pass backward; `bwd_dkdv` (or `bwd_dkdv_wide`) has the other
four. See `bwd_common` for the pipeline. The two launches do not need each other's results, so the
second starts while the last programs of the first still run (programmatic dependent launch): few
heads then fill the GPU together, and no SM idles between the two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from lmlab.kernels.hopper.bwd_common import (
    LOG2E,
    add_product,
    alloc_stage_barriers,
    alloc_tiles,
    end_with_overlapped,
    pass_over,
    producer,
    start_s_and_dp,
    store_chunks,
)
from lmlab.kernels.hopper.warpgroup import WG_ROWS, key_blocks, key_mask, zero_chunks
from lmlab.kernels.tile_ops import tile_of_program, vector_offset


@gluon.jit
def key_loop(
    dq, tiles, barriers, lse_vec, delta_vec, offs_m, first, last, keys, shift, scale_log2,
    WG: gl.constexpr, MASKED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Accumulate dQ of 64 queries over key blocks [first, last)."""
    _, _, k_tiles, _, _, _ = tiles
    _, _, _, empty = barriers
    for block in range(first, last):
        stage = block % SHAPE.STAGES
        s, dp = start_s_and_dp(tiles, barriers, block, WG, SHAPE)
        s = warpgroup_mma_wait(SHAPE.CHUNKS, deps=[s])
        p = gl.exp2(s * scale_log2 - lse_vec[:, None])
        if MASKED:
            p = gl.where(key_mask(offs_m, block, keys, shift, SHAPE), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - delta_vec[:, None])
        dq = add_product(dq, ds, k_tiles, stage, SHAPE)
        mbarrier.arrive(empty.index(stage), count=1)
    return dq


@gluon.jit
def consumer(
    tiles, barriers, outputs, coords, bounds, scale,
    WG: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dQ of 64 queries."""
    batch, head, _, start = coords
    last, heads, queries, keys = bounds
    dq, lse, delta = outputs
    start = start + WG * WG_ROWS
    unmasked, seen = key_blocks(start, queries, keys, WG_ROWS, SHAPE)
    if start >= queries:
        unmasked = 0
        seen = 0
    offs_m = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, SHAPE.S_LAYOUT))
    row_base = vector_offset(batch, head, heads, queries)
    # Past the last query lse = inf makes P zero.
    lse_vec = gl.load(lse + row_base + offs_m, mask=offs_m < queries, other=float("inf")) * LOG2E
    delta_vec = gl.load(delta + row_base + offs_m, mask=offs_m < queries, other=0.0)
    dq_acc = zero_chunks(SHAPE)
    mbarrier.wait(barriers[0], 0)
    dq_acc = key_loop(
        dq_acc, tiles, barriers, lse_vec, delta_vec, offs_m, 0, unmasked, keys, keys - queries,
        scale * LOG2E, WG, False, SHAPE,
    )  # fmt: skip
    if SHAPE.HAS_MASK:
        dq_acc = key_loop(
            dq_acc, tiles, barriers, lse_vec, delta_vec, offs_m, unmasked, seen, keys,
            keys - queries, scale * LOG2E, WG, True, SHAPE,
        )  # fmt: skip
    for block in range(seen, last):
        pass_over(barriers, block, SHAPE)
    store_chunks(dq_acc, dq, tiles[1], WG, batch, head, start, scale, SHAPE)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group_size", "l2_heads"])
def flash_bwd_dq_kernel(
    q, k, v, do, lse, delta, dq, scale, batch_heads, heads, group_size, l2_heads, queries, keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One program per query tile of BLOCK_M = 64 * CONSUMERS rows; streams BLOCK_N keys."""
    BLOCK_M: gl.constexpr = SHAPE.CONSUMERS * WG_ROWS
    gdc_launch_dependents()
    query_tiles = (queries + BLOCK_M - 1) // BLOCK_M
    tile, batch, head = tile_of_program(
        gl.program_id(0), query_tiles, batch_heads, heads, l2_heads, SHAPE.IS_CAUSAL
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    coords = (batch, head, head // group_size, tile * BLOCK_M)
    _, last = key_blocks(tile * BLOCK_M, queries, keys, BLOCK_M, SHAPE)
    a_resident, b_resident, a_streamed, b_streamed = alloc_tiles((q, do), (k, v), SHAPE)
    # The last two are placeholders for lse and delta, which this kernel does not stream.
    tiles = (a_resident, b_resident, a_streamed, b_streamed, a_streamed, b_streamed)
    barriers = alloc_stage_barriers(SHAPE)
    outputs = (dq, lse, delta)
    bounds = (last, heads, queries, keys)
    gl.warp_specialize([
        (consumer, (tiles, barriers, outputs, coords, bounds, scale, 0, SHAPE)),
        (consumer, (tiles, barriers, outputs, coords, bounds, scale, 1, SHAPE)),
        (producer, ((q, do), (k, v), (k, v), tiles, barriers, coords, 0, last, 0,
                    False, False, SHAPE)),
    ], [4, 1], [240, 24])  # fmt: skip
    end_with_overlapped()
