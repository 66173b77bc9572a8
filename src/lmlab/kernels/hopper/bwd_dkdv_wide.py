"""dK and dV on Hopper at head dimensions from 129 to 256, with one warpgroup for each.

An accumulator of 64 rows takes up to 128 of a thread's 240 registers, so a warpgroup cannot hold
both. Two launches would compute S twice. Instead two warpgroups share one tile of 64 keys: the
first computes S and P and accumulates dV, the second dP and dS and accumulates dK. Both issue two
products per block. P goes from the first to the second through shared memory, in fp32.

Tile: BLOCK_N = 64 keys resident, BLOCK_M queries streamed. `bwd_dq` computes dQ.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from lmlab.kernels.hopper.bwd_common import (
    LOG2E,
    add_product,
    begin_key_tile,
    end_with_overlapped,
    probabilities,
    producer,
    store_chunks,
)
from lmlab.kernels.hopper.warpgroup import WG_ROWS, alloc_barriers, start_scores, zero_chunks

P_STAGES = gl.constexpr(1)
"""Blocks by which the warpgroup of dV may run ahead of that of dK."""


@gluon.jit
def dv_loop(
    dv, tiles, barriers, p_pipe, offs_n, origin, first, last, shift, scale_log2,
    MASKED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Accumulate dV of 64 keys over query blocks [first, last), and pass P on for dK."""
    k_tiles, _, q_tiles, do_tiles, lse_tiles, _ = tiles
    _, q_full, do_full, empty = barriers
    p_tiles, p_full, p_empty = p_pipe
    for block in range(first, last):
        step = block - origin
        stage = step % SHAPE.STAGES
        p_stage = step % P_STAGES
        mbarrier.wait(q_full.index(stage), step // SHAPE.STAGES & 1)
        s = start_scores(k_tiles, 0, q_tiles, stage, SHAPE)
        lse_vec = (
            lse_tiles.index(stage).reshape([SHAPE.BLOCK]).load(gl.SliceLayout(0, SHAPE.S_LAYOUT))
        )
        s = warpgroup_mma_wait(0, deps=[s])
        p = probabilities(s, lse_vec, block, offs_n, shift, scale_log2, MASKED, SHAPE)
        mbarrier.wait(p_empty.index(p_stage), (step // P_STAGES & 1) ^ 1)
        p_tiles.index(p_stage).store(p)
        mbarrier.arrive(p_full.index(p_stage), count=1)
        mbarrier.wait(do_full.index(stage), step // SHAPE.STAGES & 1)
        dv = add_product(dv, p, do_tiles, stage, SHAPE)
        mbarrier.arrive(empty.index(stage), count=1)
    return dv


@gluon.jit
def dv_consumer(tiles, barriers, p_pipe, dv, coords, bounds, scale, SHAPE: gl.constexpr):
    """One warpgroup: dV of 64 keys."""
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, SHAPE.S_LAYOUT))
    dv_acc = zero_chunks(SHAPE)
    mbarrier.wait(barriers[0], 0)
    if SHAPE.IS_CAUSAL:
        dv_acc = dv_loop(
            dv_acc, tiles, barriers, p_pipe, offs_n, first, first, unmasked, shift, scale * LOG2E,
            True, SHAPE,
        )  # fmt: skip
    dv_acc = dv_loop(
        dv_acc, tiles, barriers, p_pipe, offs_n, first, unmasked, last, shift, scale * LOG2E,
        False, SHAPE,
    )  # fmt: skip
    store_chunks(dv_acc, dv, tiles[0], 0, batch, head, start, 1.0, SHAPE)


@gluon.jit
def dk_consumer(tiles, barriers, p_pipe, dk, coords, first, last, scale, SHAPE: gl.constexpr):
    """One warpgroup: dK of 64 keys."""
    _, v_tiles, q_tiles, do_tiles, _, delta_tiles = tiles
    resident_full, q_full, do_full, empty = barriers
    p_tiles, p_full, p_empty = p_pipe
    batch, head, _, start = coords
    dk_acc = zero_chunks(SHAPE)
    mbarrier.wait(resident_full, 0)
    for step in range(0, last - first):
        stage = step % SHAPE.STAGES
        p_stage = step % P_STAGES
        mbarrier.wait(do_full.index(stage), step // SHAPE.STAGES & 1)
        dp = start_scores(v_tiles, 0, do_tiles, stage, SHAPE)
        delta_vec = (
            delta_tiles.index(stage).reshape([SHAPE.BLOCK]).load(gl.SliceLayout(0, SHAPE.S_LAYOUT))
        )
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.wait(p_full.index(p_stage), step // P_STAGES & 1)
        ds = p_tiles.index(p_stage).load(SHAPE.S_LAYOUT) * (dp - delta_vec[None, :])
        mbarrier.arrive(p_empty.index(p_stage), count=1)
        mbarrier.wait(q_full.index(stage), step // SHAPE.STAGES & 1)
        dk_acc = add_product(dk_acc, ds, q_tiles, stage, SHAPE)
        mbarrier.arrive(empty.index(stage), count=1)
    store_chunks(dk_acc, dk, tiles[1], 0, batch, head, start, scale, SHAPE)


@gluon.jit
def alloc_p_pipe(SHAPE: gl.constexpr):
    """Shared memory for P, and its full and empty barriers."""
    # In this layout, eight rows of a store or load fall into different banks.
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_tiles = gl.allocate_shared_memory(gl.float32, [P_STAGES, WG_ROWS, SHAPE.BLOCK], LAYOUT)
    return p_tiles, alloc_barriers(P_STAGES, 1), alloc_barriers(P_STAGES, 1)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_dkdv_wide_kernel(
    q, k, v, do, lse, delta, dk, dv, scale, batch_heads, heads, l2_heads, queries, keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 64 rows; streams BLOCK_M queries."""
    _, coords, bounds, tiles, barriers = begin_key_tile(
        (q, k, v, do), (lse, delta), batch_heads, heads, l2_heads, queries, keys, WG_ROWS, SHAPE
    )
    first, _, last, _ = bounds
    p_pipe = alloc_p_pipe(SHAPE)
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (dv_consumer, (tiles, barriers, p_pipe, dv, coords, bounds, scale, SHAPE)),
        (dk_consumer, (tiles, barriers, p_pipe, dk, coords, first, last, scale, SHAPE)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last, first,
                    True, False, SHAPE)),
    ], [4, 1], [240, 24])  # fmt: skip
    end_with_overlapped()
