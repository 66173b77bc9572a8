"""Shared parts of the warp-specialized backward kernels for Hopper.

Every backward kernel keeps 64-row tiles of two tensors resident per consumer warpgroup and streams
blocks of the two others through a ring of STAGES buffers: for dK and dV, K and V are resident and
Q and dO streamed; for dQ it is the reverse. In shared helpers, `a` stands for the operands of S
(Q and K), `b` for those of dP (dO and V), and BLOCK for the streamed rows (BLOCK_M or BLOCK_N).

For each block a consumer issues S and dP together, computes P while dP is still in flight, and dS
while dV is. All products of a block finish before the next block begins: if one stays in flight
across iterations, the compiler cannot tell their registers apart and serializes every wgmma
(warning C7512). The other warpgroup fills the gap.

Registers limit the tile sizes: at head dimension 128 the dK and dV accumulators of 64 rows take 128
of a thread's 240 registers, and blocks of 64 queries just fit. Beyond that, one warpgroup
accumulates dK and another dV (`bwd_dkdv_wide`).

The log-sum-exp and delta are loaded by TMA along with Q and dO. Past the last query TMA reads zeros
everywhere, so P = 1 is multiplied by dO = 0 and no mask is needed. Past the last key, K = 0 gives
P = exp(-lse), which may be infinite. That matters only where dS is multiplied by K (the fused
kernel): there P is capped at one (RAGGED_KEYS). The other kernels do not store those keys' rows.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code=assignment

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmlab.kernels.hopper.warpgroup import (
    WG_ROWS,
    alloc_barriers,
    async_load,
    begin_tma_store,
    load_chunks,
    start_product,
    start_scores,
    zero_chunks,
)
from lmlab.kernels.tile_ops import tile_of_program

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def producer(
    resident, streamed, vectors, tiles, barriers, coords, first, last, origin,
    HAS_VECTORS: gl.constexpr, REVERSED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Load the resident tiles of each consumer, then stream blocks [first, last) of a and b.

    `origin` is the block to begin with: the first or, if REVERSED, one from which to go backwards.
    `vectors` are lse (with a) and delta (with b), one number per streamed row; K and V have none.
    """
    a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors = tiles
    resident_full, a_full, b_full, empty = barriers
    batch, head, streamed_head, start = coords
    VECTOR_BYTES: gl.constexpr = 4 * SHAPE.BLOCK if HAS_VECTORS else 0
    STAGE_BYTES: gl.constexpr = SHAPE.CHUNKS * streamed[0].block_type.nbytes + VECTOR_BYTES
    TILES: gl.constexpr = SHAPE.CONSUMERS * SHAPE.CHUNKS
    mbarrier.expect(resident_full, 2 * TILES * resident[0].block_type.nbytes)
    for wg in gl.static_range(SHAPE.CONSUMERS):
        corner = (batch, head, start + wg * WG_ROWS)
        load_chunks(resident[0], corner, resident_full, a_resident, wg, SHAPE)
        load_chunks(resident[1], corner, resident_full, b_resident, wg, SHAPE)
    for step in range(0, last - first):
        block = origin + step
        if REVERSED:
            block = block_backwards(origin, step, last, SHAPE)
        stage = step % SHAPE.STAGES
        # The first wait on each stage passes: a fresh barrier's previous phase counts as complete.
        mbarrier.wait(empty.index(stage), (step // SHAPE.STAGES & 1) ^ 1)
        corner = (batch, streamed_head, block * SHAPE.BLOCK)
        a_barrier, b_barrier = a_full.index(stage), b_full.index(stage)
        mbarrier.expect(a_barrier, STAGE_BYTES)
        load_chunks(streamed[0], corner, a_barrier, a_streamed, stage, SHAPE)
        mbarrier.expect(b_barrier, STAGE_BYTES)
        load_chunks(streamed[1], corner, b_barrier, b_streamed, stage, SHAPE)
        if HAS_VECTORS:
            edge = [batch, streamed_head, block * SHAPE.BLOCK]
            async_load(vectors[0], edge, a_barrier, a_vectors.index(stage))
            async_load(vectors[1], edge, b_barrier, b_vectors.index(stage))


@gluon.jit
def block_backwards(origin, step, last, SHAPE: gl.constexpr):
    """The block `step` before `origin`; if ROTATED, the last comes before the first."""
    block = origin - step
    if SHAPE.ROTATED:
        block = gl.where(block < 0, block + last, block)
    return block


@gluon.jit
def start_s_and_dp(tiles, barriers, step, WG: gl.constexpr, SHAPE: gl.constexpr):
    """Issue S and dP as soon as their blocks have arrived."""
    a_resident, b_resident, a_streamed, b_streamed, _, _ = tiles
    _, a_full, b_full, _ = barriers
    stage = step % SHAPE.STAGES
    phase = step // SHAPE.STAGES & 1
    mbarrier.wait(a_full.index(stage), phase)
    s = start_scores(a_resident, WG, a_streamed, stage, SHAPE)
    mbarrier.wait(b_full.index(stage), phase)
    return s, start_scores(b_resident, WG, b_streamed, stage, SHAPE)


@gluon.jit
def pass_over(barriers, step, SHAPE: gl.constexpr):
    """Release a block that this warpgroup does not need."""
    _, a_full, b_full, empty = barriers
    stage = step % SHAPE.STAGES
    # Wait until it is full: an earlier arrival could count for the previous round of the ring.
    mbarrier.wait(a_full.index(stage), step // SHAPE.STAGES & 1)
    mbarrier.wait(b_full.index(stage), step // SHAPE.STAGES & 1)
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def add_product(acc, scores, streamed, stage, SHAPE: gl.constexpr):
    """Add the product of P or dS with a streamed tile to an accumulator, and wait for it."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SHAPE.O_LAYOUT, 2)
    operand = gl.convert_layout(scores.to(streamed.dtype), P_LAYOUT)
    total = start_product(operand, streamed, stage, acc, SHAPE)
    total = warpgroup_mma_wait(0, deps=total)
    return (total,) if SHAPE.CHUNKS == 1 else total


@gluon.jit
def store_chunks(acc, target, staging, wg, batch, head, start, scale, SHAPE: gl.constexpr):
    """Store an accumulator; `staging` is a resident tile that only this warpgroup used."""
    for chunk in gl.static_range(SHAPE.CHUNKS):
        tile = staging.index(wg * SHAPE.CHUNKS + chunk)
        begin_tma_store(acc[chunk] * scale, target, tile, batch, head, start, chunk, SHAPE)
    tma.store_wait(0)


@gluon.jit
def alloc_tiles(resident, streamed, SHAPE: gl.constexpr):
    """Shared memory for the resident tiles of each consumer and STAGES blocks of a and b."""
    rows: gl.constexpr = [SHAPE.CONSUMERS * SHAPE.CHUNKS, 1, 1, WG_ROWS, SHAPE.CHUNK]
    a_resident = gl.allocate_shared_memory(resident[0].dtype, rows, resident[0].layout)
    b_resident = gl.allocate_shared_memory(resident[1].dtype, rows, resident[1].layout)
    block: gl.constexpr = [SHAPE.STAGES * SHAPE.CHUNKS, 1, 1, SHAPE.BLOCK, SHAPE.CHUNK]
    a_streamed = gl.allocate_shared_memory(streamed[0].dtype, block, streamed[0].layout)
    b_streamed = gl.allocate_shared_memory(streamed[1].dtype, block, streamed[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed


@gluon.jit
def alloc_dkdv_tiles(resident, streamed, vectors, SHAPE: gl.constexpr):
    """Shared memory for a pass over queries, which also streams lse and delta."""
    a_resident, b_resident, a_streamed, b_streamed = alloc_tiles(resident, streamed, SHAPE)
    numbers: gl.constexpr = [SHAPE.STAGES, 1, 1, SHAPE.BLOCK]
    a_vectors = gl.allocate_shared_memory(gl.float32, numbers, vectors[0].layout)
    b_vectors = gl.allocate_shared_memory(gl.float32, numbers, vectors[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors


@gluon.jit
def alloc_stage_barriers(SHAPE: gl.constexpr):
    """Barriers: resident tiles full; and for each stage, a full, b full, both empty again."""
    resident_full = alloc_barriers(1, 1).index(0)
    barriers = (
        resident_full, alloc_barriers(SHAPE.STAGES, 1), alloc_barriers(SHAPE.STAGES, 1),
        alloc_barriers(SHAPE.STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    return barriers


@gluon.jit
def query_blocks(start, last, shift, ROWS: gl.constexpr, SHAPE: gl.constexpr):
    """First of `last` query blocks that sees any of ROWS keys, and first that sees all of them."""
    first = 0
    unmasked = 0
    if SHAPE.IS_CAUSAL:
        first = gl.minimum(gl.maximum(start - shift, 0) // SHAPE.BLOCK, last)
        unmasked = (gl.maximum(start + ROWS - 1 - shift, 0) + SHAPE.BLOCK - 1) // SHAPE.BLOCK
        unmasked = gl.minimum(unmasked, last)
    return first, unmasked


@gluon.jit
def begin_key_tile(
    inputs, vectors, batch_heads, heads, l2_heads, queries, keys,
    ROWS: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """This program's tile of ROWS keys: its place, its query blocks, shared memory and barriers."""
    gdc_launch_dependents()  # a pass that follows may start once all programs of this one have
    q, k, v, do = inputs
    key_tiles = (keys + ROWS - 1) // ROWS
    tile, batch, head = tile_of_program(
        gl.program_id(0), key_tiles, batch_heads, heads, l2_heads, False
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    last = (queries + SHAPE.BLOCK - 1) // SHAPE.BLOCK
    shift = keys - queries
    first, unmasked = query_blocks(tile * ROWS, last, shift, ROWS, SHAPE)
    tiles = alloc_dkdv_tiles((k, v), (q, do), vectors, SHAPE)
    coords = (batch, head, head, tile * ROWS)
    return tile, coords, (first, unmasked, last, shift), tiles, alloc_stage_barriers(SHAPE)


@gluon.jit
def end_with_overlapped():
    """A launch must not end before the one it overlaps; one program that waits is enough."""
    if gl.program_id(0) == gl.num_programs(0) - 1:
        gdc_wait()


@gluon.jit
def probabilities(
    s, lse_vec, block, offs_n, shift, scale_log2, MASKED: gl.constexpr, SHAPE: gl.constexpr
):
    """P of 64 keys by BLOCK_M queries from S and the log-sum-exp."""
    p = s * scale_log2 - (lse_vec * LOG2E)[None, :]
    if SHAPE.RAGGED_KEYS:
        p = gl.minimum(p, 0.0)
    p = gl.exp2(p)
    if MASKED:
        first_query = offs_n - shift - block * SHAPE.BLOCK
        offs_m = gl.arange(0, SHAPE.BLOCK, gl.SliceLayout(0, SHAPE.S_LAYOUT))
        p = gl.where(first_query[:, None] <= offs_m[None, :], p, 0.0)
    return p


@gluon.jit
def query_loop(
    grads, tiles, barriers, ds_pipe, offs_n, origin, first, last, shift, scale_log2,
    WG: gl.constexpr, MASKED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of 64 keys over blocks of queries.

    S, P, dP and dS are transposed, keys down and queries across, so that dV = P^T dO and
    dK = dS^T Q are plain products whose left operand is already in registers. If DS_STAGES is 0,
    the loop runs over blocks [first, last), and `origin` is the first block of all. Otherwise dS is
    also passed on for dQ, and [first, last) are steps backwards from block `origin`.
    """
    _, _, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, empty = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SHAPE.O_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, SHAPE.S_LAYOUT)
    dk, dv = grads
    for index in range(first, last):
        step = index if SHAPE.DS_STAGES > 0 else index - origin
        stage = step % SHAPE.STAGES
        s, dp = start_s_and_dp(tiles, barriers, step, WG, SHAPE)
        lse_vec = lse_tiles.index(stage).reshape([SHAPE.BLOCK]).load(COL_LAYOUT)
        s = warpgroup_mma_wait(SHAPE.CHUNKS, deps=[s])
        block = origin - index if SHAPE.DS_STAGES > 0 else index
        p = probabilities(s, lse_vec, block, offs_n, shift, scale_log2, MASKED, SHAPE)
        operand = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT)
        dv = start_product(operand, do_tiles, stage, dv, SHAPE)
        delta_vec = delta_tiles.index(stage).reshape([SHAPE.BLOCK]).load(COL_LAYOUT)
        dp = warpgroup_mma_wait(SHAPE.CHUNKS, deps=[dp])
        ds = (p * (dp - delta_vec[None, :])).to(q_tiles.dtype)
        if SHAPE.DS_STAGES > 0:
            ds_tiles, ds_full, ds_empty = ds_pipe
            ds_stage = step % SHAPE.DS_STAGES
            mbarrier.wait(ds_empty.index(ds_stage), (step // SHAPE.DS_STAGES & 1) ^ 1)
            ds_tiles.index(2 * ds_stage + WG).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(ds_stage), count=1)
        operand = gl.convert_layout(ds, P_LAYOUT)
        dk = start_product(operand, q_tiles, stage, dk, SHAPE)
        done = warpgroup_mma_wait(0, deps=dk + dv)
        dk, dv = done[: SHAPE.CHUNKS], done[SHAPE.CHUNKS :]
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def dkdv_consumer(
    tiles, barriers, ds_pipe, outputs, coords, bounds, scale,
    WG: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys and, if DS_STAGES > 0, dS for the dQ warpgroup."""
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    start = start + WG * WG_ROWS
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, SHAPE.S_LAYOUT))
    grads = (zero_chunks(SHAPE), zero_chunks(SHAPE))
    mbarrier.wait(barriers[0], 0)
    # The diagonal comes first or, when running backwards, last.
    if SHAPE.DS_STAGES > 0:
        origin = last - 1
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, 0, last - unmasked, shift,
            scale * LOG2E, WG, False, SHAPE,
        )  # fmt: skip
        # Steps backwards, not blocks: those from from_block to unmasked_from are masked.
        from_block = last - unmasked
        unmasked_from = last - first
    else:
        origin = first
        from_block, unmasked_from = query_blocks(start, last, shift, WG_ROWS, SHAPE)
        for block in range(first, from_block):
            pass_over(barriers, block - first, SHAPE)
    if SHAPE.IS_CAUSAL:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, from_block, unmasked_from, shift,
            scale * LOG2E, WG, True, SHAPE,
        )  # fmt: skip
    if SHAPE.DS_STAGES == 0:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, unmasked_from, last, shift,
            scale * LOG2E, WG, False, SHAPE,
        )  # fmt: skip
    dk_acc, dv_acc = grads
    dk, dv = outputs
    store_chunks(dv_acc, dv, tiles[1], WG, batch, head, start, 1.0, SHAPE)
    store_chunks(dk_acc, dk, tiles[1], WG, batch, head, start, scale, SHAPE)
