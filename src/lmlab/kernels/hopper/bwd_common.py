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
)

from lmlab.kernels.hopper.warpgroup import WG_ROWS, store_by_tma


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
