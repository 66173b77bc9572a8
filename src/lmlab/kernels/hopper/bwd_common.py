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

Gluon shapes are powers of two. To avoid padding head dimension 192 to 256, tiles of more than 128
columns consist of CHUNKS chunks of CHUNK columns, loaded and multiplied one by one.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper.warpgroup import WG_ROWS, alloc_barriers, begin_tma_store

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def load_chunks(source, corner, barrier, tiles, index, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    """Load tile `index` by TMA, chunk by chunk."""
    batch, head, start = corner
    for chunk in gl.static_range(CHUNKS):
        tile = tiles.index(index * CHUNKS + chunk)
        tma.async_copy_global_to_shared(source, [batch, head, start, chunk * CHUNK], barrier, tile)


@gluon.jit
def producer(
    resident, streamed, vectors, tiles, barriers, coords, first, last,
    CONSUMERS: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, HAS_VECTORS: gl.constexpr, REVERSED: gl.constexpr,
):  # fmt: skip
    """Load the resident tiles of each consumer, then stream blocks [first, last) of a and b.

    `vectors` are lse (with a) and delta (with b), one number per streamed row; K and V have none.
    """
    a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors = tiles
    resident_full, a_full, b_full, empty = barriers
    batch, head, streamed_head, start = coords
    VECTOR_BYTES: gl.constexpr = 4 * BLOCK if HAS_VECTORS else 0
    STAGE_BYTES: gl.constexpr = CHUNKS * streamed[0].block_type.nbytes + VECTOR_BYTES
    mbarrier.expect(resident_full, 2 * CONSUMERS * CHUNKS * resident[0].block_type.nbytes)
    for wg in gl.static_range(CONSUMERS):
        corner = (batch, head, start + wg * WG_ROWS)
        load_chunks(resident[0], corner, resident_full, a_resident, wg, CHUNK, CHUNKS)
        load_chunks(resident[1], corner, resident_full, b_resident, wg, CHUNK, CHUNKS)
    for step in range(0, last - first):
        block = first + step
        if REVERSED:
            block = last - 1 - step
        stage = step % STAGES
        # The first wait on each stage passes: a fresh barrier's previous phase counts as complete.
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        corner = (batch, streamed_head, block * BLOCK)
        a_barrier, b_barrier = a_full.index(stage), b_full.index(stage)
        mbarrier.expect(a_barrier, STAGE_BYTES)
        load_chunks(streamed[0], corner, a_barrier, a_streamed, stage, CHUNK, CHUNKS)
        mbarrier.expect(b_barrier, STAGE_BYTES)
        load_chunks(streamed[1], corner, b_barrier, b_streamed, stage, CHUNK, CHUNKS)
        if HAS_VECTORS:
            edge = [batch, streamed_head, block * BLOCK]
            tma.async_copy_global_to_shared(vectors[0], edge, a_barrier, a_vectors.index(stage))
            tma.async_copy_global_to_shared(vectors[1], edge, b_barrier, b_vectors.index(stage))


@gluon.jit
def start_scores(
    resident, wg, streamed, stage,
    BLOCK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the product of a resident and a streamed tile: S or dP."""
    scores = gl.zeros([WG_ROWS, BLOCK], gl.float32, S_LAYOUT)
    for chunk in gl.static_range(CHUNKS):
        rows = resident.index(wg * CHUNKS + chunk).reshape([WG_ROWS, CHUNK])
        columns = streamed.index(stage * CHUNKS + chunk).reshape([BLOCK, CHUNK]).permute((1, 0))
        scores = warpgroup_mma(rows, columns, scores, use_acc=chunk > 0, is_async=True)
    return scores


@gluon.jit
def start_s_and_dp(
    tiles, barriers, step,
    WG: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue S and dP as soon as their blocks have arrived."""
    a_resident, b_resident, a_streamed, b_streamed, _, _ = tiles
    _, a_full, b_full, _ = barriers
    stage = step % STAGES
    phase = step // STAGES & 1
    mbarrier.wait(a_full.index(stage), phase)
    s = start_scores(a_resident, WG, a_streamed, stage, BLOCK, CHUNK, CHUNKS, S_LAYOUT)
    mbarrier.wait(b_full.index(stage), phase)
    dp = start_scores(b_resident, WG, b_streamed, stage, BLOCK, CHUNK, CHUNKS, S_LAYOUT)
    return s, dp


@gluon.jit
def pass_over(barriers, step, STAGES: gl.constexpr):
    """Release a block that this warpgroup does not need."""
    _, a_full, b_full, empty = barriers
    stage = step % STAGES
    # Wait until it is full: an earlier arrival could count for the previous round of the ring.
    mbarrier.wait(a_full.index(stage), step // STAGES & 1)
    mbarrier.wait(b_full.index(stage), step // STAGES & 1)
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def zero_chunks(CHUNK: gl.constexpr, CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """A zeroed accumulator of 64 rows, in chunks."""
    return (gl.zeros([WG_ROWS, CHUNK], gl.float32, LAYOUT),) * CHUNKS


@gluon.jit
def add_product(
    acc, scores, streamed, stage,
    BLOCK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the product of P or dS with a streamed tile to an accumulator, and wait for it."""
    operand = gl.convert_layout(scores.to(streamed.dtype), gl.DotOperandLayout(0, LAYOUT, 2))
    total = ()
    for chunk in gl.static_range(CHUNKS):
        columns = streamed.index(stage * CHUNKS + chunk).reshape([BLOCK, CHUNK])
        total += (warpgroup_mma(operand, columns, acc[chunk], is_async=True),)
    total = warpgroup_mma_wait(0, deps=total)
    return (total,) if CHUNKS == 1 else total


@gluon.jit
def store_chunks(
    acc, target, staging, wg, batch, head, start, scale, CHUNK: gl.constexpr, CHUNKS: gl.constexpr
):
    """Store an accumulator; `staging` is a resident tile that only this warpgroup used."""
    for chunk in gl.static_range(CHUNKS):
        tile = staging.index(wg * CHUNKS + chunk)
        begin_tma_store(acc[chunk] * scale, target, tile, batch, head, start, chunk * CHUNK, CHUNK)
    tma.store_wait(0)


@gluon.jit
def alloc_tiles(
    resident, streamed,
    CONSUMERS: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory for the resident tiles of each consumer and STAGES blocks of a and b."""
    rows: gl.constexpr = [CONSUMERS * CHUNKS, 1, 1, WG_ROWS, CHUNK]
    a_resident = gl.allocate_shared_memory(resident[0].dtype, rows, resident[0].layout)
    b_resident = gl.allocate_shared_memory(resident[1].dtype, rows, resident[1].layout)
    block: gl.constexpr = [STAGES * CHUNKS, 1, 1, BLOCK, CHUNK]
    a_streamed = gl.allocate_shared_memory(streamed[0].dtype, block, streamed[0].layout)
    b_streamed = gl.allocate_shared_memory(streamed[1].dtype, block, streamed[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed


@gluon.jit
def alloc_dkdv_tiles(
    resident, streamed, vectors,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory for a pass over queries, which also streams lse and delta."""
    a_resident, b_resident, a_streamed, b_streamed = alloc_tiles(
        resident, streamed, CONSUMERS, BLOCK_M, CHUNK, CHUNKS, STAGES
    )
    a_vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], vectors[0].layout)
    b_vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], vectors[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors


@gluon.jit
def alloc_stage_barriers(STAGES: gl.constexpr):
    """Barriers: resident tiles full; and for each stage, a full, b full, both empty again."""
    resident_full = alloc_barriers(1, 1).index(0)
    barriers = (
        resident_full, alloc_barriers(STAGES, 1), alloc_barriers(STAGES, 1),
        alloc_barriers(STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    return barriers


@gluon.jit
def query_blocks(
    start, last, shift, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """First of `last` query blocks that sees any of ROWS keys, and first that sees all of them."""
    first = 0
    unmasked = 0
    if IS_CAUSAL:
        first = gl.minimum(gl.maximum(start - shift, 0) // BLOCK_M, last)
        unmasked = (gl.maximum(start + ROWS - 1 - shift, 0) + BLOCK_M - 1) // BLOCK_M
        unmasked = gl.minimum(unmasked, last)
    return first, unmasked


@gluon.jit
def probabilities(
    s, lse_vec, block, offs_n, shift, scale_log2,
    BLOCK_M: gl.constexpr, MASKED: gl.constexpr, RAGGED_KEYS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """P of 64 keys by BLOCK_M queries from S and the log-sum-exp."""
    p = s * scale_log2 - (lse_vec * LOG2E)[None, :]
    if RAGGED_KEYS:
        p = gl.minimum(p, 0.0)
    p = gl.exp2(p)
    if MASKED:
        first_query = offs_n - shift - block * BLOCK_M
        offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S_LAYOUT))
        p = gl.where(first_query[:, None] <= offs_m[None, :], p, 0.0)
    return p


@gluon.jit
def query_loop(
    grads, tiles, barriers, ds_pipe, offs_n, origin, first, last, shift, scale_log2,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, MASKED: gl.constexpr, RAGGED_KEYS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of 64 keys over blocks of queries.

    S, P, dP and dS are transposed, keys down and queries across, so that dV = P^T dO and
    dK = dS^T Q are plain products whose left operand is already in registers. If DS_STAGES is 0,
    the loop runs over blocks [first, last), and `origin` is the first block of all. Otherwise dS is
    also passed on for dQ, and [first, last) are steps backwards from block `origin`.
    """
    _, _, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, empty = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dk, dv = grads
    for index in range(first, last):
        step = index if DS_STAGES > 0 else index - origin
        stage = step % STAGES
        s, dp = start_s_and_dp(tiles, barriers, step, WG, BLOCK_M, BLOCK_D, 1, STAGES, S_LAYOUT)
        lse_vec = lse_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT)
        s = warpgroup_mma_wait(1, deps=[s])
        block = origin - index if DS_STAGES > 0 else index
        p = probabilities(
            s, lse_vec, block, offs_n, shift, scale_log2, BLOCK_M, MASKED, RAGGED_KEYS, S_LAYOUT
        )
        operand = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT)
        do_tile = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        dv = warpgroup_mma(operand, do_tile, dv, is_async=True)
        delta_vec = delta_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - delta_vec[None, :])).to(q_tiles.dtype)
        if DS_STAGES > 0:
            ds_tiles, ds_full, ds_empty = ds_pipe
            ds_stage = step % DS_STAGES
            mbarrier.wait(ds_empty.index(ds_stage), (step // DS_STAGES & 1) ^ 1)
            ds_tiles.index(2 * ds_stage + WG).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(ds_stage), count=1)
        operand = gl.convert_layout(ds, P_LAYOUT)
        q_tile = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        dk = warpgroup_mma(operand, q_tile, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def dkdv_consumer(
    tiles, barriers, ds_pipe, outputs, coords, bounds, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, RAGGED_KEYS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys and, if DS_STAGES > 0, dS for the dQ warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    start = start + WG * WG_ROWS
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    mbarrier.wait(barriers[0], 0)
    # The diagonal comes first or, when running backwards, last.
    if DS_STAGES > 0:
        origin = last - 1
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, 0, last - unmasked, shift,
            scale * LOG2E, WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, False, RAGGED_KEYS,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        # Steps backwards, not blocks: those from from_block to unmasked_from are masked.
        from_block = last - unmasked
        unmasked_from = last - first
    else:
        origin = first
        from_block, unmasked_from = query_blocks(start, last, shift, BLOCK_M, WG_ROWS, IS_CAUSAL)
        for block in range(first, from_block):
            pass_over(barriers, block - first, STAGES)
    if IS_CAUSAL:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, from_block, unmasked_from, shift,
            scale * LOG2E, WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, True, RAGGED_KEYS,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if DS_STAGES == 0:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, unmasked_from, last, shift,
            scale * LOG2E, WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, False, RAGGED_KEYS,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    dk_acc, dv_acc = grads
    dk, dv = outputs
    store_chunks((dv_acc,), dv, tiles[1], WG, batch, head, start, 1.0, BLOCK_D, 1)
    store_chunks((dk_acc,), dk, tiles[1], WG, batch, head, start, scale, BLOCK_D, 1)
