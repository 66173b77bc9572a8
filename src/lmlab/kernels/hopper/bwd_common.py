"""Shared parts of the warp-specialized backward kernels for Hopper.

Every backward kernel keeps two tiles resident per consumer warpgroup (64 rows each) and streams
blocks of two other tensors through a ring of STAGES buffers: K and V resident with Q and dO
streamed where dK and dV are computed, the reverse for dQ. In helpers that serve both, `a` is the
tensor that makes S (Q or K) and `b` the one that makes dP (dO or V), and BLOCK is the number of
streamed rows (BLOCK_M or BLOCK_N).

For each block a consumer issues S and dP together, computes P while dP is still in flight, and dS
while dV is. All products of a block finish before the next begins: if one stays in flight across
the loop edge, the compiler cannot tell their registers apart and serializes every wgmma (warning
C7512). The other warpgroup fills that gap.

Registers set the sizes: at head dimension 128 the accumulators dK and dV of 64 rows take 128 of a
thread's 240 registers, and blocks of 64 queries just fit. At 256 only one of them does, so
`bwd_dkdv` runs once for each and computes S once more.

The log-sum-exp and delta are loaded by TMA along with Q and dO. Past the last query TMA reads zeros
everywhere, so P = 1 is multiplied by dO = 0 and no mask is needed. Past the last key, K = 0 gives
P = exp(-lse), which may be infinite: where no causal mask hides such keys, P is capped at one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper.warpgroup import WG_ROWS, store_by_tma

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def producer(
    resident, streamed, vectors, tiles, barriers, coords, first, last,
    CONSUMERS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    HAS_VECTORS: gl.constexpr, REVERSED: gl.constexpr, NEEDS_DP: gl.constexpr,
):  # fmt: skip
    """Load the resident tiles of each consumer, then stream blocks [first, last) of a and b.

    `vectors` holds one number per streamed row for a (lse) and b (delta); K and V have none.
    Without NEEDS_DP the second resident tile is not used.
    """
    a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors = tiles
    resident_full, a_full, b_full, empty = barriers
    batch, head, streamed_head, start = coords
    STAGE_BYTES: gl.constexpr = streamed[0].block_type.nbytes + (4 * BLOCK if HAS_VECTORS else 0)
    RESIDENT: gl.constexpr = 2 if NEEDS_DP else 1
    mbarrier.expect(resident_full, RESIDENT * CONSUMERS * resident[0].block_type.nbytes)
    for wg in gl.static_range(CONSUMERS):
        corner = [batch, head, start + wg * WG_ROWS, 0]
        tma.async_copy_global_to_shared(resident[0], corner, resident_full, a_resident.index(wg))
        if NEEDS_DP:
            b_tile = b_resident.index(wg)
            tma.async_copy_global_to_shared(resident[1], corner, resident_full, b_tile)
    for step in range(0, last - first):
        block = first + step
        if REVERSED:
            block = last - 1 - step
        stage = step % STAGES
        # The first wait on each stage passes: a fresh barrier counts as one phase ahead.
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        corner = [batch, streamed_head, block * BLOCK, 0]
        a_barrier, b_barrier = a_full.index(stage), b_full.index(stage)
        mbarrier.expect(a_barrier, STAGE_BYTES)
        tma.async_copy_global_to_shared(streamed[0], corner, a_barrier, a_streamed.index(stage))
        mbarrier.expect(b_barrier, STAGE_BYTES)
        tma.async_copy_global_to_shared(streamed[1], corner, b_barrier, b_streamed.index(stage))
        if HAS_VECTORS:
            edge = [batch, streamed_head, block * BLOCK]
            tma.async_copy_global_to_shared(vectors[0], edge, a_barrier, a_vectors.index(stage))
            tma.async_copy_global_to_shared(vectors[1], edge, b_barrier, b_vectors.index(stage))


@gluon.jit
def start_s_and_dp(
    tiles, barriers, step,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    NEEDS_DP: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the products of resident with streamed tiles: S and, if needed, dP."""
    a_resident, b_resident, a_streamed, b_streamed, _, _ = tiles
    _, a_full, b_full, _ = barriers
    stage = step % STAGES
    phase = step // STAGES & 1
    zeros = gl.zeros([WG_ROWS, BLOCK], gl.float32, S_LAYOUT)
    resident = a_resident.index(WG).reshape([WG_ROWS, BLOCK_D])
    streamed = a_streamed.index(stage).reshape([BLOCK, BLOCK_D]).permute((1, 0))
    mbarrier.wait(a_full.index(stage), phase)
    s = warpgroup_mma(resident, streamed, zeros, use_acc=False, is_async=True)
    dp = zeros
    mbarrier.wait(b_full.index(stage), phase)
    if NEEDS_DP:
        resident = b_resident.index(WG).reshape([WG_ROWS, BLOCK_D])
        streamed = b_streamed.index(stage).reshape([BLOCK, BLOCK_D]).permute((1, 0))
        dp = warpgroup_mma(resident, streamed, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def alloc_tiles(
    resident, streamed,
    CONSUMERS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    NEEDS_DP: gl.constexpr,
):  # fmt: skip
    """Shared memory for the resident tiles of each consumer and STAGES of both streamed ones."""
    resident_shape: gl.constexpr = [CONSUMERS, 1, 1, WG_ROWS, BLOCK_D]
    stage_shape: gl.constexpr = [STAGES, 1, 1, BLOCK, BLOCK_D]
    a_resident = gl.allocate_shared_memory(resident[0].dtype, resident_shape, resident[0].layout)
    b_resident = a_resident
    if NEEDS_DP:
        b_resident = gl.allocate_shared_memory(
            resident[1].dtype, resident_shape, resident[1].layout
        )
    a_streamed = gl.allocate_shared_memory(streamed[0].dtype, stage_shape, streamed[0].layout)
    b_streamed = gl.allocate_shared_memory(streamed[1].dtype, stage_shape, streamed[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed


@gluon.jit
def alloc_dkdv_tiles(
    resident, streamed, vectors,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    NEEDS_DP: gl.constexpr,
):  # fmt: skip
    """Shared memory of a pass over queries, whose blocks come with lse and delta."""
    a_resident, b_resident, a_streamed, b_streamed = alloc_tiles(
        resident, streamed, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, NEEDS_DP
    )
    a_vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], vectors[0].layout)
    b_vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], vectors[1].layout)
    return a_resident, b_resident, a_streamed, b_streamed, a_vectors, b_vectors


@gluon.jit
def alloc_ds_pipe(
    dtype: gl.constexpr, BLOCK_M: gl.constexpr, DS_STAGES: gl.constexpr, READERS: gl.constexpr
):
    """Shared memory through which both consumers hand dS to the warpgroups that compute dQ."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * DS_STAGES, WG_ROWS, BLOCK_M], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=READERS)
    return ds_tiles, full, empty


@gluon.jit
def alloc_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """One barrier for the resident tiles; per stage two filled by TMA, one for release."""
    resident_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    a_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(resident_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(a_full.index(stage), count=1)
        mbarrier.init(b_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return resident_full, a_full, b_full, empty


@gluon.jit
def query_blocks(
    tile, queries, keys, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """Query blocks of a key tile: the first, the first that needs no mask, the end."""
    shift = keys - queries
    first = 0
    unmasked = 0
    last = (queries + BLOCK_M - 1) // BLOCK_M
    if IS_CAUSAL:
        first = gl.maximum(tile * BLOCK_N - shift, 0) // BLOCK_M
        unmasked = (gl.maximum(tile * BLOCK_N + BLOCK_N - 1 - shift, 0) + BLOCK_M - 1) // BLOCK_M
        unmasked = gl.minimum(unmasked, last)
    return first, unmasked, last


@gluon.jit
def store_dkdv(
    grads, outputs, staging, batch, head, start, scale,
    BLOCK_D: gl.constexpr, NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr,
):  # fmt: skip
    """Store dK and dV of 64 keys; `staging` is a tile that only this warpgroup used."""
    dk_acc, dv_acc = grads
    dk, dv = outputs
    if NEEDS_DV:
        store_by_tma(dv_acc, dv, staging, batch, head, start, BLOCK_D)
    if NEEDS_DK:
        store_by_tma(dk_acc * scale, dk, staging, batch, head, start, BLOCK_D)


@gluon.jit
def query_loop(
    grads, tiles, barriers, ds_pipe, offs_n, origin, first, last, shift, scale_log2,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, MASKED: gl.constexpr, RAGGED_KEYS: gl.constexpr,
    NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of 64 keys over blocks of queries.

    S, P, dP and dS are transposed, keys down and queries across, so that dV = P^T dO and
    dK = dS^T Q are plain products whose left operand is already in registers. Without DS_STAGES
    these are blocks [first, last), and `origin` is the first of all. With them dS is handed on, and
    [first, last) are steps from block `origin` backwards.
    """
    _, _, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, empty = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dk, dv = grads
    for index in range(first, last):
        step = index if DS_STAGES > 0 else index - origin
        stage = step % STAGES
        s, dp = start_s_and_dp(
            tiles, barriers, step, WG, BLOCK_D, BLOCK_M, STAGES, NEEDS_DK, S_LAYOUT
        )
        lse_vec = lse_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT) * LOG2E
        s = warpgroup_mma_wait(1 if NEEDS_DK else 0, deps=[s])
        p = s * scale_log2 - lse_vec[None, :]
        if RAGGED_KEYS:
            p = gl.minimum(p, 0.0)
        p = gl.exp2(p)
        if MASKED:
            block = origin - index if DS_STAGES > 0 else index
            offs_m = block * BLOCK_M + gl.arange(0, BLOCK_M, COL_LAYOUT)
            p = gl.where(offs_n[:, None] <= offs_m[None, :] + shift, p, 0.0)
        if NEEDS_DV:
            operand = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT)
            do_tile = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
            dv = warpgroup_mma(operand, do_tile, dv, is_async=True)
        if NEEDS_DK:
            delta_vec = delta_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT)
            dp = warpgroup_mma_wait(1 if NEEDS_DV else 0, deps=[dp])
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
        if NEEDS_DK and NEEDS_DV:
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        elif NEEDS_DK:
            dk = warpgroup_mma_wait(0, deps=[dk])
        else:
            dv = warpgroup_mma_wait(0, deps=[dv])
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def dkdv_consumer(
    tiles, barriers, ds_pipe, outputs, coords, bounds, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, RAGGED_KEYS: gl.constexpr,
    NEEDS_DK: gl.constexpr, NEEDS_DV: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and with DS_STAGES dS for the warpgroup of dQ: one warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    start = start + WG * WG_ROWS
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    # The diagonal comes first or, running backwards, last.
    origin = last - 1 if DS_STAGES > 0 else first
    masked_from = last - unmasked if DS_STAGES > 0 else first
    masked_to = last - first if DS_STAGES > 0 else unmasked
    mbarrier.wait(barriers[0], 0)
    if DS_STAGES > 0:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, 0, masked_from, shift, scale * LOG2E,
            WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, False, RAGGED_KEYS, NEEDS_DK, NEEDS_DV,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if IS_CAUSAL:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, masked_from, masked_to, shift,
            scale * LOG2E, WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, True, RAGGED_KEYS,
            NEEDS_DK, NEEDS_DV, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if DS_STAGES == 0:
        grads = query_loop(
            grads, tiles, barriers, ds_pipe, offs_n, origin, masked_to, last, shift,
            scale * LOG2E, WG, BLOCK_D, BLOCK_M, STAGES, DS_STAGES, False, RAGGED_KEYS,
            NEEDS_DK, NEEDS_DV, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    staging = tiles[1].index(WG)
    store_dkdv(grads, outputs, staging, batch, head, start, scale, BLOCK_D, NEEDS_DK, NEEDS_DV)
