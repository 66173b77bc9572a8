"""Warp-specialized FlashAttention forward for Hopper: one producer warp, two or three consumers.

The portable kernel (`flash_forward`) waits for Q K^T before the softmax and for the softmax before
P V; only another program on the SM fills the gap. Triton's compiler places those waits, so this
kernel is written in Gluon, where warpgroups and barriers are explicit.

- The producer warp loads tiles by TMA into a ring of STAGES buffers. It keeps 24 registers per
  thread and leaves the rest to the consumers (240 each with two).
- A consumer warpgroup owns 64 query rows. It issues Q K^T of block j and P V of block j - 1
  together and runs the softmax of block j as soon as the first is done, so the tensor cores work on
  the second meanwhile. The other warpgroups do the same, out of phase.
- Barriers: a stage is `full` when its bytes have arrived and `empty` when every consumer has read
  it. The phase bit flips each time round the ring.

BLOCK_M (query rows) is 64 per consumer, BLOCK_N (key rows) the length of a K/V block.
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

from lmlab.kernels.hopper.warpgroup import WG_ROWS, store_rows
from lmlab.kernels.tile_ops import tile_of_program

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def producer(
    inputs, tensors, coords, blocks,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load Q once, then K and V block by block into empty stages."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, barriers, _, _, _ = tensors
    batch, head, kv_head, start = coords
    q_full, k_full, k_empty, v_full, v_empty = barriers
    mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
    for wg in gl.static_range(CONSUMERS):
        corner = [batch, head, start + wg * WG_ROWS, 0]
        tma.async_copy_global_to_shared(q, corner, q_full, q_tiles.index(wg))
    for block in range(blocks):
        stage = block % STAGES
        # The first wait on each stage passes: a fresh barrier counts as one phase ahead.
        phase = (block // STAGES & 1) ^ 1
        corner = [batch, kv_head, block * BLOCK_N, 0]
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, corner, k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, corner, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def apply_mask(
    s, offs_m, block, keys, shift,
    BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Set scores to -inf for keys past the end or in a query's future."""
    offs_n = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    mask = (offs_n < keys)[None, :]
    if IS_CAUSAL:
        mask = mask & (offs_n[None, :] <= offs_m[:, None] + shift)
    return gl.where(mask, s, float("-inf"))


@gluon.jit
def online_softmax(s, row_max, row_sum, scale_log2):
    """One online-softmax update: P, row sums, row maxima, and the factor to rescale the past."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    return p, row_sum * rescale + gl.sum(p, 1), new_max, rescale


@gluon.jit
def key_loop(
    state, q_tile, k_tiles, v_tiles, barriers, offs_m, first, last, keys, shift, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key blocks [first, last), software-pipelined: S of this block with P V of the previous one.

    Both products are in flight when the softmax begins, which needs only the first.
    """
    _, k_full, k_empty, v_full, v_empty = barriers
    acc, p, row_sum, row_max = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    zeros = gl.zeros([WG_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    for block in range(first, last):
        stage = block % STAGES
        prev_stage = (block - 1) % STAGES
        mbarrier.wait(k_full.index(stage), block // STAGES & 1)
        k_tile = k_tiles.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        s = warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(prev_stage), (block - 1) // STAGES & 1)
        v_tile = v_tiles.index(prev_stage).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p, v_tile, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            s = apply_mask(s, offs_m, block, keys, shift, BLOCK_N, IS_CAUSAL, S_LAYOUT)
        new_p, row_sum, row_max, rescale = online_softmax(s, row_max, row_sum, scale_log2)
        # The product reads the previous P from registers until here.
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(prev_stage), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(new_p.to(v_tiles.dtype), P_LAYOUT)
    return acc, p, row_sum, row_max


@gluon.jit
def first_block(
    q_tile, k_tiles, barriers, offs_m, keys, shift, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Softmax state after key block 0, which is visible to every query."""
    _, k_full, k_empty, _, _ = barriers
    mbarrier.wait(k_full.index(0), 0)
    k_tile = k_tiles.index(0).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    zeros = gl.zeros([WG_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    s = apply_mask(s, offs_m, 0, keys, shift, BLOCK_N, IS_CAUSAL, S_LAYOUT)
    row_max = gl.full([WG_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.full([WG_ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p, row_sum, row_max, _ = online_softmax(s, row_max, row_sum, scale_log2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    p = gl.convert_layout(p.to(k_tiles.dtype), P_LAYOUT)
    acc = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    return acc, p, row_sum, row_max


@gluon.jit
def epilogue(
    acc, row_sum, row_max, o, lse, o_strides, batch, head, heads, start, queries,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalize by the row sums; store the output and the log-sum-exp (natural log)."""
    offs_m = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    row_base = lse + (batch.to(gl.int64) * heads + head) * queries
    gl.store(row_base + offs_m, (row_max + gl.log2(row_sum)) * LN2, mask=offs_m < queries)
    output = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
    store_rows(output, o, o_strides, batch, head, start, queries, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit
def consumer(
    tensors, coords, bounds, scale_log2,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attention of 64 query rows: one warpgroup."""
    q_tiles, k_tiles, v_tiles, barriers, o, lse, o_strides = tensors
    batch, head, heads, start = coords
    queries, keys, unmasked, blocks = bounds
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q_full, _, _, v_full, _ = barriers
    start = start + WG * WG_ROWS
    offs_m = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    shift = keys - queries
    mbarrier.wait(q_full, 0)
    q_tile = q_tiles.index(WG).reshape([WG_ROWS, BLOCK_D])
    state = first_block(
        q_tile, k_tiles, barriers, offs_m, keys, shift, scale_log2,
        BLOCK_D, BLOCK_N, IS_CAUSAL, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    state = key_loop(
        state, q_tile, k_tiles, v_tiles, barriers, offs_m, 1, unmasked, keys, shift, scale_log2,
        BLOCK_D, BLOCK_N, STAGES, IS_CAUSAL, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    state = key_loop(
        state, q_tile, k_tiles, v_tiles, barriers, offs_m, gl.maximum(unmasked, 1), blocks, keys,
        shift, scale_log2, BLOCK_D, BLOCK_N, STAGES, IS_CAUSAL, True, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    acc, p, row_sum, row_max = state
    last = blocks - 1
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    v_tile = v_tiles.index(last % STAGES).reshape([BLOCK_N, BLOCK_D])
    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    epilogue(
        acc, row_sum, row_max, o, lse, o_strides, batch, head, heads, start, queries,
        BLOCK_D, HEAD_DIM, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit
def alloc_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """One barrier for Q; for each stage of K and V one filled by TMA, one released by consumers."""
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return q_full, k_full, k_empty, v_full, v_empty


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group_size", "l2_heads"])
def flash_fwd_hopper_kernel(
    q, k, v, o, lse, o_strides, scale_log2, batch_heads, heads, group_size, l2_heads, queries, keys,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program per query tile of BLOCK_M = 64 * CONSUMERS rows."""
    BLOCK_M: gl.constexpr = CONSUMERS * WG_ROWS
    tiles = (queries + BLOCK_M - 1) // BLOCK_M
    tile, batch, head = tile_of_program(
        gl.program_id(0), tiles, batch_heads, heads, l2_heads, IS_CAUSAL
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    start = tile * BLOCK_M
    end = keys
    unmasked = keys
    if IS_CAUSAL:
        end = gl.minimum(keys, start + BLOCK_M + keys - queries)
        unmasked = gl.minimum(keys, start + 1 + keys - queries)
    blocks = (end + BLOCK_N - 1) // BLOCK_N
    unmasked = unmasked // BLOCK_N
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, WG_ROWS, BLOCK_D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v.layout)
    barriers = alloc_barriers(CONSUMERS, STAGES)
    tensors = (q_tiles, k_tiles, v_tiles, barriers, o, lse, o_strides)
    coords = (batch, head, heads, start)
    bounds = (queries, keys, unmasked, blocks)
    inputs = (q, k, v)
    load_coords = (batch, head, head // group_size, start)
    # Constexprs survive only in tuples written in the call itself.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (tensors, coords, bounds, scale_log2,
                        0, BLOCK_D, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL)),
            (consumer, (tensors, coords, bounds, scale_log2,
                        1, BLOCK_D, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL)),
            (producer, (inputs, tensors, load_coords, blocks, CONSUMERS, BLOCK_N, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, coords, bounds, scale_log2,
                        0, BLOCK_D, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL)),
            (consumer, (tensors, coords, bounds, scale_log2,
                        1, BLOCK_D, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL)),
            (consumer, (tensors, coords, bounds, scale_log2,
                        2, BLOCK_D, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL)),
            (producer, (inputs, tensors, load_coords, blocks, CONSUMERS, BLOCK_N, STAGES)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
