"""The forward kernel for Hopper with its warps specialised: one loads, two or three groups compute.

The plain kernel (`flash_forward`) waits for Q K^T before the softmax and for the softmax before
P V; only another program on the SM fills the gap. Triton's compiler places those waits and cannot
be told otherwise, so this kernel is written in Gluon, where each group of warps and each barrier is
spelled out.

- One warp loads, by the copy engine, into a ring of slots; it keeps 24 registers and gives the rest
  to those that compute (240 each, with two groups of four warps).
- A group computes 64 queries. It starts Q K^T of a block and P V of the block before, and does the
  softmax as soon as the first is done, under the second: in-flight products are what the tensor
  cores work on meanwhile. The other group does the same half a turn apart.
- Barriers: a slot is `ready` when its bytes have come, `free` when every group has read it. A phase
  flips each time round the ring.

On an H200 (bf16, causal, 16 heads, sequence 16384) in milliseconds: head dimension 64, two groups
with blocks of 64 keys 1.40, of 128 1.27; three groups (192 queries) 1.25 and 1.12 with three slots,
1.19 with two; cuDNN 1.21 in the same process. Head dimension 128, two groups: blocks of 64 1.93, of
128 1.80 with three slots, 1.84 with two; the plain kernel 2.19; cuDNN 2.00. Not tried: letting the
groups take turns by barrier, so that their softmaxes never coincide.
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
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper_group import ROWS, write
from lmlab.kernels.tiles import place

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def produce(
    source, tensors, where, blocks,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the queries once, then keys and values block by block into slots that are free."""
    q, k, v = source
    q_tiles, k_tiles, v_tiles, barriers, _, _, _ = tensors
    batch, head, kv_head, start = where
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    mbarrier.expect(q_ready, CONSUMERS * q.block_type.nbytes)
    for which in gl.static_range(CONSUMERS):
        corner = [batch, head, start + which * ROWS, 0]
        tma.async_copy_global_to_shared(q, corner, q_ready, q_tiles.index(which))
    for block in range(blocks):
        slot = block % STAGES
        # A slot's first use passes at once: an unused barrier counts as one phase ahead.
        freed = (block // STAGES & 1) ^ 1
        corner = [batch, kv_head, block * WALKED, 0]
        mbarrier.wait(k_free.index(slot), freed)
        mbarrier.expect(k_ready.index(slot), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, corner, k_ready.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), freed)
        mbarrier.expect(v_ready.index(slot), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, corner, v_ready.index(slot), v_tiles.index(slot))


@gluon.jit
def only_seen(
    scores, rows, block, keys, shift,
    WALKED: gl.constexpr, IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores with minus infinity for keys beyond the end or in a query's future."""
    columns = block * WALKED + gl.arange(0, WALKED, gl.SliceLayout(0, LAYOUT))
    seen = (columns < keys)[None, :]
    if IS_CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + shift)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def soften(scores, peak, total, scale_log2):
    """One step of the running softmax: weights, their sum, the peak, and what corrects the past."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
    correction = gl.exp2(peak - new_peak)
    return weights, total * correction + gl.sum(weights, 1), new_peak, correction


@gluon.jit
def walk(
    state, q_tile, k_tiles, v_tiles, barriers, rows, first, last, keys, shift, scale_log2,
    BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys `first` to `last`; the values of the block before are multiplied meanwhile.

    Both products are under way when the softmax begins, which needs the first of them only.
    """
    _, k_ready, k_free, v_ready, v_free = barriers
    acc, weights, total, peak = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    nothing = gl.zeros([ROWS, WALKED], gl.float32, S_LAYOUT)
    for block in range(first, last):
        slot = block % STAGES
        before = (block - 1) % STAGES
        mbarrier.wait(k_ready.index(slot), block // STAGES & 1)
        k_tile = k_tiles.index(slot).reshape([WALKED, BLOCK_D]).permute((1, 0))
        scores = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), (block - 1) // STAGES & 1)
        v_tile = v_tiles.index(before).reshape([WALKED, BLOCK_D])
        acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(slot), count=1)
        if MASKED:
            scores = only_seen(scores, rows, block, keys, shift, WALKED, IS_CAUSAL, S_LAYOUT)
        new_weights, total, peak, correction = soften(scores, peak, total, scale_log2)
        # The old weights are in registers that the product reads until here.
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(new_weights.to(v_tiles.dtype), P_LAYOUT)
    return acc, weights, total, peak


@gluon.jit
def begin(
    q_tile, k_tiles, barriers, rows, keys, shift, scale_log2,
    BLOCK_D: gl.constexpr, WALKED: gl.constexpr, IS_CAUSAL: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The first block of keys, which every query sees something of."""
    _, k_ready, k_free, _, _ = barriers
    mbarrier.wait(k_ready.index(0), 0)
    k_tile = k_tiles.index(0).reshape([WALKED, BLOCK_D]).permute((1, 0))
    nothing = gl.zeros([ROWS, WALKED], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    scores = only_seen(scores, rows, 0, keys, shift, WALKED, IS_CAUSAL, S_LAYOUT)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    weights, total, peak, _ = soften(scores, peak, total, scale_log2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    weights = gl.convert_layout(weights.to(k_tiles.dtype), P_LAYOUT)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    return acc, weights, total, peak


@gluon.jit
def finish(
    acc, total, peak, o, lse, o_strides, batch, head, heads, start, queries,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Divide by the sum of the weights; write the output and the log-sum-exp in natural log."""
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    of_pair = lse + (batch.to(gl.int64) * heads + head) * queries
    gl.store(of_pair + rows, (peak + gl.log2(total)) * LN2, mask=rows < queries)
    mean = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    write(mean, o, o_strides, batch, head, start, queries, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit
def consume(
    tensors, where, sizes, scale_log2,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries: one group of four warps."""
    q_tiles, k_tiles, v_tiles, barriers, o, lse, o_strides = tensors
    batch, head, heads, start = where
    queries, keys, clear, blocks = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q_ready, _, _, v_ready, _ = barriers
    start = start + WHICH * ROWS
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    shift = keys - queries
    mbarrier.wait(q_ready, 0)
    q_tile = q_tiles.index(WHICH).reshape([ROWS, BLOCK_D])
    state = begin(
        q_tile, k_tiles, barriers, rows, keys, shift, scale_log2,
        BLOCK_D, WALKED, IS_CAUSAL, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    state = walk(
        state, q_tile, k_tiles, v_tiles, barriers, rows, 1, clear, keys, shift, scale_log2,
        BLOCK_D, WALKED, STAGES, IS_CAUSAL, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    state = walk(
        state, q_tile, k_tiles, v_tiles, barriers, rows, gl.maximum(clear, 1), blocks, keys,
        shift, scale_log2, BLOCK_D, WALKED, STAGES, IS_CAUSAL, True, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    acc, weights, total, peak = state
    last = blocks - 1
    mbarrier.wait(v_ready.index(last % STAGES), last // STAGES & 1)
    v_tile = v_tiles.index(last % STAGES).reshape([WALKED, BLOCK_D])
    acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    finish(
        acc, total, peak, o, lse, o_strides, batch, head, heads, start, queries,
        BLOCK_D, HEAD_DIM, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit
def make_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of the queries and of each slot: filled by the copy engine, emptied by consumers."""
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=CONSUMERS)
        mbarrier.init(v_free.index(slot), count=CONSUMERS)
    fence_async_shared()
    return q_ready, k_ready, k_free, v_ready, v_free


@gluon.jit(do_not_specialize=["pairs", "heads", "group", "abreast"])
def hopper_forward_kernel(
    q, k, v, o, lse, o_strides, scale_log2, pairs, heads, group, abreast, queries, keys,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries: 64 for each consumer."""
    KEPT: gl.constexpr = CONSUMERS * ROWS
    tiles = (queries + KEPT - 1) // KEPT
    tile, batch, head = place(gl.program_id(0), tiles, pairs, heads, abreast, IS_CAUSAL)
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    start = tile * KEPT
    end = keys
    clear = keys
    if IS_CAUSAL:
        end = gl.minimum(keys, start + KEPT + keys - queries)
        clear = gl.minimum(keys, start + 1 + keys - queries)
    blocks = (end + WALKED - 1) // WALKED
    clear = clear // WALKED
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, WALKED, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, WALKED, BLOCK_D], v.layout)
    barriers = make_barriers(CONSUMERS, STAGES)
    tensors = (q_tiles, k_tiles, v_tiles, barriers, o, lse, o_strides)
    where = (batch, head, heads, start)
    sizes = (queries, keys, clear, blocks)
    source = (q, k, v)
    place_kv = (batch, head, head // group, start)
    # Compile-time values stay so only where the tuple is written in the call itself.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (tensors, where, sizes, scale_log2,
                       0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
            (consume, (tensors, where, sizes, scale_log2,
                       1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
            (produce, (source, tensors, place_kv, blocks, CONSUMERS, WALKED, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (tensors, where, sizes, scale_log2,
                       0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
            (consume, (tensors, where, sizes, scale_log2,
                       1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
            (consume, (tensors, where, sizes, scale_log2,
                       2, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
            (produce, (source, tensors, place_kv, blocks, CONSUMERS, WALKED, STAGES)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
