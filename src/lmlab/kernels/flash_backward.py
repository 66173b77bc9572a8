"""FlashAttention-2 backward: dQ, dK and dV from the log-sum-exp, in one launch plus one for delta.

With delta = rowsum(O * dO), and P = exp(S scale - lse) recomputed from the log-sum-exp:

    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = dS K scale    dK = dS^T Q scale

Each score tile needs five products, and throughput is quoted by that count. But dK and dV are sums
over queries and dQ a sum over keys: a program that owns a key tile would have to add to dQ in
memory, and with atomics the result would depend on timing. Here one pass over queries computes dK
and dV (four products) and one over keys computes dQ (three), with S and dP computed twice: seven
products, but deterministic. (`hopper.bwd_fused` needs five, by ordering the additions.)

Tile shapes: M counts query rows, N key rows. BLOCK_M x BLOCK_N is the tile of the dK/dV pass, which
keeps BLOCK_N keys resident and streams BLOCK_M queries per iteration. The dQ pass uses the tile
transposed: BLOCK_N queries are resident and BLOCK_M keys streamed.

The dK/dV pass computes scores transposed (keys down, queries across), so that both accumulations
are plain products with the small operand in registers. Under a causal mask, key tile i needs the
queries after it and query tile i the keys before it, so programs that do both (PAIRED) all take
equally long. Small problems need more programs and run the two passes side by side; if these are
too few, SPLITS programs share a loop, and the last to arrive adds up their sums in a fixed order.

Delta comes from a separate memory-bound launch (`flash_delta`), from the launch that decomposes
fp32 inputs (`fp32_terms`), or, with the option `inline-delta`, is computed inline from O and dO.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.flash_delta import compute_delta
from lmlab.kernels.fp32_terms import dot_terms, load_terms, to_terms, transpose_terms
from lmlab.kernels.tile_ops import (
    attention_mask,
    is_last_split,
    key_range,
    load_vector,
    query_range,
    reduce_partials,
    split_range,
    store_partial,
    store_tile,
    tile_of_program,
    vector_offset,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dkdv_inner(
    grads, k_tile, v_tile, q, do, o, q_strides, do_strides, o_strides, batches, lse, delta, batch,
    head, offs_n, first, last, queries, shift, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
    TERMS: tl.constexpr, INLINE_DELTA: tl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of one key tile over queries [first, last).

    S, P, dP and dS are transposed: keys down, queries across.
    """
    dk, dv = grads
    for start in tl.range(first, last, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        q_tile = load_terms(
            q, batches, q_strides, batch, head, start, queries,
            BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, TERMS,
        )  # fmt: skip
        # Past the last query lse = inf makes P zero.
        lse_vec = load_vector(lse, start, queries, float("inf"), BLOCK_M, RAGGED) * LOG2E
        zeros = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
        s = dot_terms(zeros, k_tile, transpose_terms(q_tile, TERMS), PRECISION, TERMS)
        p = tl.exp2(s * scale_log2 - lse_vec[None, :])
        if MASKED:
            offs_m = start + tl.arange(0, BLOCK_M)
            p = tl.where(offs_n[:, None] <= offs_m[None, :] + shift, p, 0.0)
        do_tile = load_terms(
            do, batches, do_strides, batch, head, start, queries,
            BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, TERMS,
        )  # fmt: skip
        dtype: tl.constexpr = q_tile[0].dtype
        dv = dot_terms(dv, to_terms(p, dtype, TERMS), do_tile, PRECISION, TERMS)
        if INLINE_DELTA:
            delta_vec = compute_delta(
                do_tile[0], o, o_strides, batch, head, start, queries,
                BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED,
            )  # fmt: skip
        else:
            delta_vec = load_vector(delta, start, queries, 0.0, BLOCK_M, RAGGED)
        dp = dot_terms(zeros, v_tile, transpose_terms(do_tile, TERMS), PRECISION, TERMS)
        ds = p * (dp - delta_vec[None, :])
        dk = dot_terms(dk, to_terms(ds, dtype, TERMS), q_tile, PRECISION, TERMS)
    return dk, dv


@triton.jit
def dq_inner(
    dq, q_tile, do_tile, lse_vec, delta_vec, k, v, k_strides, v_strides, batches,
    batch, head, offs_m, first, last, keys, shift, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Accumulate dQ of one query tile over keys [first, last)."""
    for start in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = load_terms(
            k, batches, k_strides, batch, head, start, keys,
            BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, TERMS,
        )  # fmt: skip
        v_tile = load_terms(
            v, batches, v_strides, batch, head, start, keys,
            BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, TERMS,
        )  # fmt: skip
        zeros = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        s = dot_terms(zeros, q_tile, transpose_terms(k_tile, TERMS), PRECISION, TERMS)
        p = tl.exp2(s * scale_log2 - lse_vec[:, None])
        if MASKED:
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = attention_mask(offs_m[:, None], offs_n[None, :], keys, shift, IS_CAUSAL, RAGGED)
            p = tl.where(mask, p, 0.0)
        dp = dot_terms(zeros, do_tile, transpose_terms(v_tile, TERMS), PRECISION, TERMS)
        ds = p * (dp - delta_vec[:, None])
        dtype: tl.constexpr = k_tile[0].dtype
        dq = dot_terms(dq, to_terms(ds, dtype, TERMS), k_tile, PRECISION, TERMS)
    return dq


@triton.jit
def dkdv_tile(
    work_id, split, partials, semaphores, tile, batch, head, q, k_ptr, v_ptr, do, o, lse, delta, dk,
    dv, q_strides, k_strides, v_strides, do_strides, o_strides, dk_strides, dv_strides, batches,
    scale, heads, group_size, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr,
    INLINE_DELTA: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile: loop over the queries of all heads that share it."""
    start = tile * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    first, unmasked = query_range(start, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    last = queries
    if SPLITS > 1:
        first, last = split_range(first, last, split, BLOCK_M, SPLITS)
        unmasked = tl.minimum(tl.maximum(unmasked, first), last)
    # Keys past the last read as zeros; their gradient rows are not stored.
    k_tile = load_terms(
        k_ptr, batches, k_strides, batch, head, start, keys,
        BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False, TERMS,
    )  # fmt: skip
    v_tile = load_terms(
        v_ptr, batches, v_strides, batch, head, start, keys,
        BLOCK_N, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False, TERMS,
    )  # fmt: skip
    grads = (
        tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32),
        tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32),
    )
    for member in range(group_size):
        q_head = head * group_size + member
        row_base = vector_offset(batch, q_head, heads, queries)
        if IS_CAUSAL:
            grads = dkdv_inner(
                grads, k_tile, v_tile, q, do, o, q_strides, do_strides, o_strides, batches,
                lse + row_base, delta + row_base, batch, q_head, offs_n, first, unmasked,
                queries, keys - queries, scale * LOG2E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM,
                True, RAGGED_QUERIES, PRECISION, DESCRIPTOR, TERMS, INLINE_DELTA,
            )  # fmt: skip
        grads = dkdv_inner(
            grads, k_tile, v_tile, q, do, o, q_strides, do_strides, o_strides, batches,
            lse + row_base, delta + row_base, batch, q_head, offs_n, unmasked, last,
            queries, keys - queries, scale * LOG2E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM,
            False, RAGGED_QUERIES, PRECISION, DESCRIPTOR, TERMS, INLINE_DELTA,
        )  # fmt: skip
    dk_acc, dv_acc = grads
    complete = True
    if SPLITS > 1:
        store_partial(dk_acc, 2 * (work_id * SPLITS + split), partials, BLOCK_N, BLOCK_D)
        store_partial(dv_acc, 2 * (work_id * SPLITS + split) + 1, partials, BLOCK_N, BLOCK_D)
        complete = is_last_split(work_id, semaphores, SPLITS)
        if complete:
            dk_acc = reduce_partials(2 * work_id * SPLITS, 2, partials, BLOCK_N, BLOCK_D, SPLITS)
            dv_acc = reduce_partials(
                2 * work_id * SPLITS + 1, 2, partials, BLOCK_N, BLOCK_D, SPLITS
            )
    if complete:
        store_tile(dv, dv_strides, batch, head, start, keys, dv_acc, BLOCK_N, BLOCK_D, HEAD_DIM)
        dk_acc = dk_acc * scale
        store_tile(dk, dk_strides, batch, head, start, keys, dk_acc, BLOCK_N, BLOCK_D, HEAD_DIM)


@triton.jit
def dq_tile(
    work_id, split, partials, semaphores, tile, batch, head, q_ptr, k, v, do_ptr, o, lse, delta, dq,
    q_strides, k_strides, v_strides, do_strides, o_strides, dq_strides, batches, scale, heads,
    group_size, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr,
    INLINE_DELTA: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile: loop over the keys that it sees."""
    start = tile * BLOCK_M
    offs_m = start + tl.arange(0, BLOCK_M)
    unmasked, end = key_range(start, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    first = 0
    if SPLITS > 1:
        first, end = split_range(first, end, split, BLOCK_N, SPLITS)
        unmasked = tl.minimum(tl.maximum(unmasked, first), end)
    row_base = vector_offset(batch, head, heads, queries)
    q_tile = load_terms(
        q_ptr, batches, q_strides, batch, head, start, queries,
        BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False, TERMS,
    )  # fmt: skip
    do_tile = load_terms(
        do_ptr, batches, do_strides, batch, head, start, queries,
        BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False, TERMS,
    )  # fmt: skip
    lse_vec = load_vector(lse + row_base, start, queries, float("inf"), BLOCK_M, RAGGED_QUERIES)
    lse_vec = lse_vec * LOG2E
    if INLINE_DELTA:
        delta_vec = compute_delta(
            do_tile[0], o, o_strides, batch, head, start, queries,
            BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED_QUERIES,
        )  # fmt: skip
    else:
        delta_vec = load_vector(delta + row_base, start, queries, 0.0, BLOCK_M, RAGGED_QUERIES)
    dq_acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    dq_acc = dq_inner(
        dq_acc, q_tile, do_tile, lse_vec, delta_vec, k, v, k_strides, v_strides, batches, batch,
        head // group_size, offs_m, first, unmasked, keys, keys - queries, scale * LOG2E,
        BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, IS_CAUSAL, False, False, PRECISION, DESCRIPTOR, TERMS,
    )  # fmt: skip
    if IS_CAUSAL or RAGGED_KEYS:
        dq_acc = dq_inner(
            dq_acc, q_tile, do_tile, lse_vec, delta_vec, k, v, k_strides, v_strides, batches, batch,
            head // group_size, offs_m, unmasked, end, keys, keys - queries, scale * LOG2E, BLOCK_M,
            BLOCK_N, BLOCK_D, HEAD_DIM, IS_CAUSAL, True, RAGGED_KEYS, PRECISION, DESCRIPTOR, TERMS,
        )  # fmt: skip
    complete = True
    if SPLITS > 1:
        store_partial(dq_acc, 2 * (work_id * SPLITS + split), partials, BLOCK_M, BLOCK_D)
        complete = is_last_split(work_id, semaphores, SPLITS)
        if complete:
            dq_acc = reduce_partials(2 * work_id * SPLITS, 2, partials, BLOCK_M, BLOCK_D, SPLITS)
    if complete:
        dq_acc = dq_acc * scale
        store_tile(dq, dq_strides, batch, head, start, queries, dq_acc, BLOCK_M, BLOCK_D, HEAD_DIM)


@triton.jit(do_not_specialize=["batches", "batch_kv_heads", "kv_heads", "l2_heads"])
def flash_backward_kernel(
    q, k, v, do, q_ptr, k_ptr, v_ptr, do_ptr, o, lse, delta, dq, dk, dv, partials, semaphores,
    q_strides, k_strides, v_strides, do_strides, o_strides, dq_strides, dk_strides, dv_strides,
    batches, scale, batch_kv_heads, kv_heads, group_size, l2_heads, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PAIRED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, TERMS: tl.constexpr,
    SPLITS: tl.constexpr, INLINE_DELTA: tl.constexpr,
):  # fmt: skip
    """dK/dV pass and dQ pass, one after the other in each program (PAIRED) or side by side.

    PAIRED: program i does key tile i, then query tile i. Otherwise the first programs do the key
    tiles and the others the query tiles, SPLITS programs to a tile. q, k, v and do are streamed and
    may be TMA descriptors; the `_ptr` arguments are the same tensors, for resident tiles. With
    INLINE_DELTA `delta` is not read.
    """
    work_id = tl.program_id(0) // SPLITS
    split = tl.program_id(0) - work_id * SPLITS
    heads = kv_heads * group_size
    key_tiles = (keys + BLOCK_N - 1) // BLOCK_N
    query_tiles = (queries + BLOCK_N - 1) // BLOCK_N
    if PAIRED:
        tiles = tl.maximum(key_tiles, query_tiles)
        tile, batch, head = tile_of_program(
            work_id, tiles, batch_kv_heads, kv_heads, l2_heads, False
        )
        does_dkdv = tile < key_tiles
        does_dq = tile < query_tiles
    else:
        dkdv_items = key_tiles * batch_kv_heads
        does_dkdv = work_id < dkdv_items
        does_dq = work_id >= dkdv_items
        if does_dkdv:
            tile, batch, head = tile_of_program(
                work_id, key_tiles, batch_kv_heads, kv_heads, l2_heads, False
            )
        else:
            tile, batch, head = tile_of_program(
                work_id - dkdv_items, query_tiles, batch_kv_heads * group_size, heads,
                l2_heads * group_size, IS_CAUSAL,
            )  # fmt: skip
    if does_dkdv:
        dkdv_tile(
            work_id, split, partials, semaphores, tile, batch, head, q, k_ptr, v_ptr, do, o, lse,
            delta, dk, dv, q_strides, k_strides, v_strides, do_strides, o_strides, dk_strides,
            dv_strides, batches, scale, heads, group_size, queries, keys, BLOCK_M, BLOCK_N, BLOCK_D,
            HEAD_DIM, IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR, TERMS, SPLITS,
            INLINE_DELTA,
        )  # fmt: skip
    if does_dq:
        # Transposed tile: BLOCK_N queries are resident and BLOCK_M keys streamed.
        dq_tile(
            work_id, split, partials, semaphores, tile, batch, head, q_ptr, k, v, do_ptr, o, lse,
            delta, dq, q_strides, k_strides, v_strides, do_strides, o_strides, dq_strides, batches,
            scale, heads, group_size, queries, keys, BLOCK_N, BLOCK_M, BLOCK_D, HEAD_DIM, IS_CAUSAL,
            RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR, TERMS, SPLITS, INLINE_DELTA,
        )  # fmt: skip
