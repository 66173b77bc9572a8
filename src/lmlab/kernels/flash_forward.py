"""FlashAttention-2 forward: softmax(Q K^T scale) V in one launch; scores never leave the chip.

Cost of one head with S queries and keys and head dimension d in 16 bit:

- Matrix products: 4 S^2 d FLOPs, under a causal mask half (tiles above the diagonal are skipped).
- Memory: 8 S d bytes to read Q, K, V and write O once, so S / 4 FLOPs per byte under the mask, no
  longer memory-bound from about a thousand queries on. K and V are re-read for each query tile, but
  from the L2 (heads are scheduled in groups that fit in it).
- Exponentials: S^2 / 2. A Hopper SM computes 16 per clock, while its tensor cores do 4096 FLOPs.
  At d = 64 a score costs 256 FLOPs and one exponential, so softmax and products take equally long,
  and a kernel that does not overlap them reaches half of the peak; at d = 128, two thirds.

Hence the design: one FMA and one exp2 per score (scale and log2(e) are folded into one factor); a
loop without a mask for key tiles that every query of the program sees, and a second, masked loop
for the diagonal and the ragged end. Q K^T of the next tile overlaps P V of this one; softmax is
overlapped by another program on the same SM, so tiles are as large as two resident programs allow
(`tile_sizes`). The longest loops start first.

Split-KV: a single head of a few thousand queries has fewer tiles than the GPU has SMs. SPLITS
programs then share the keys of one query tile, store partial softmax states in a workspace, and the
last to arrive merges them in key order, so the result is deterministic.

`hopper.fwd` is the warp-specialized version for Hopper.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tile_ops import (
    attention_mask,
    is_last_split,
    key_range,
    load_tile,
    split_range,
    store_tile,
    tile_of_program,
    vector_offset,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fwd_inner(
    state, q_tile, k, v, k_strides, v_strides, batch, head, offs_m, first, last, keys, shift,
    scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, MAY_BE_EMPTY: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [first, last), one BLOCK_N tile per iteration.

    MAY_BE_EMPTY: a query may have seen no key yet, and -inf - -inf would be NaN.
    """
    acc, row_sum, row_max = state
    for start in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = load_tile(
            k, k_strides, batch, head, start, keys, BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = attention_mask(offs_m[:, None], offs_n[None, :], keys, shift, IS_CAUSAL, RAGGED)
            s = tl.where(mask, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        safe_max = new_max
        if MAY_BE_EMPTY:
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        # One FMA and one exp2 per element: scale and log2(e) are one factor.
        p = tl.exp2(s * scale_log2 - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v_tile = load_tile(
            v, v_strides, batch, head, start, keys, BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def store_softmax_partial(
    state, work_id, split, partials,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this split's softmax state in the workspace: accumulator, row sums, row maxima."""
    acc, row_sum, row_max = state
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    partial = partials + (work_id.to(tl.int64) * SPLITS + split) * (BLOCK_M * (BLOCK_D + 2))
    tl.store(partial + offs_m[:, None] * BLOCK_D + offs_d[None, :], acc)
    tl.store(partial + BLOCK_M * BLOCK_D + offs_m, row_sum)
    tl.store(partial + BLOCK_M * (BLOCK_D + 1) + offs_m, row_max)


@triton.jit
def merge_softmax_partials(
    work_id, partials, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    """Merge the softmax states of all splits in key order.

    Other SMs wrote them: `.cg` loads from the L2, because this SM's L1 may hold stale lines.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(SPLITS):
        partial = partials + (work_id.to(tl.int64) * SPLITS + split) * (BLOCK_M * (BLOCK_D + 2))
        part_acc = tl.load(
            partial + offs_m[:, None] * BLOCK_D + offs_d[None, :], cache_modifier=".cg"
        )
        part_sum = tl.load(partial + BLOCK_M * BLOCK_D + offs_m, cache_modifier=".cg")
        part_max = tl.load(partial + BLOCK_M * (BLOCK_D + 1) + offs_m, cache_modifier=".cg")
        # The first split holds key 0, which every query sees, so the maximum is finite from here.
        new_max = tl.maximum(row_max, part_max)
        old_scale = tl.exp2(row_max - new_max)
        part_scale = tl.exp2(part_max - new_max)
        acc = acc * old_scale[:, None] + part_acc * part_scale[:, None]
        row_sum = row_sum * old_scale + part_sum * part_scale
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def epilogue(
    state, o, lse, o_strides, batch, head, heads, start, queries,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Normalize by the row sums; store the output and the log-sum-exp (natural log)."""
    acc, row_sum, row_max = state
    output = acc * (1.0 / row_sum)[:, None]
    store_tile(o, o_strides, batch, head, start, queries, output, BLOCK_M, BLOCK_D, HEAD_DIM)
    offs_m = start + tl.arange(0, BLOCK_M)
    row_base = lse + vector_offset(batch, head, heads, queries)
    tl.store(row_base + offs_m, (row_max + tl.log2(row_sum)) * LN2, mask=offs_m < queries)


@triton.jit(do_not_specialize=["batch_heads", "heads", "group_size", "l2_heads"])
def flash_forward_kernel(
    q, k, v, o, lse, partials, semaphores, q_strides, k_strides, v_strides, o_strides,
    scale_log2, batch_heads, heads, group_size, l2_heads, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M query tile (and split); loops over keys in tiles of BLOCK_N."""
    program = tl.program_id(0)
    tiles = (queries + BLOCK_M - 1) // BLOCK_M
    work_id = program // SPLITS
    split = program - work_id * SPLITS
    tile, batch, head = tile_of_program(work_id, tiles, batch_heads, heads, l2_heads, IS_CAUSAL)
    start = tile * BLOCK_M
    unmasked, end = key_range(start, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    first = 0
    if SPLITS > 1:
        first, end = split_range(first, end, split, BLOCK_N, SPLITS)
        unmasked = tl.minimum(tl.maximum(unmasked, first), end)
    q_tile = load_tile(
        q, q_strides, batch, head, start, queries,
        BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, DESCRIPTOR,
    )  # fmt: skip
    offs_m = start + tl.arange(0, BLOCK_M)
    state = (
        tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32),
        tl.full([BLOCK_M], 0.0, tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )
    state = fwd_inner(
        state, q_tile, k, v, k_strides, v_strides, batch, head // group_size, offs_m,
        first, unmasked, keys, keys - queries, scale_log2, BLOCK_N, BLOCK_D, HEAD_DIM,
        IS_CAUSAL, False, False, False, PRECISION, DESCRIPTOR,
    )  # fmt: skip
    if IS_CAUSAL or RAGGED_KEYS:
        state = fwd_inner(
            state, q_tile, k, v, k_strides, v_strides, batch, head // group_size, offs_m,
            unmasked, end, keys, keys - queries, scale_log2, BLOCK_N, BLOCK_D, HEAD_DIM,
            IS_CAUSAL, True, RAGGED_KEYS, SPLITS > 1, PRECISION, DESCRIPTOR,
        )  # fmt: skip
    complete = True
    if SPLITS > 1:
        store_softmax_partial(state, work_id, split, partials, BLOCK_M, BLOCK_D, SPLITS)
        complete = is_last_split(work_id, semaphores, SPLITS)
        if complete:
            state = merge_softmax_partials(work_id, partials, BLOCK_M, BLOCK_D, SPLITS)
    if complete:
        epilogue(
            state, o, lse, o_strides, batch, head, heads, start, queries, BLOCK_M, BLOCK_D, HEAD_DIM
        )
