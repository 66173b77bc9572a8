"""FlashAttention-2, backward: dQ, dK and dV from the log-sum-exp, in one launch or two.

With D = rowsum(O dO), and the weights P = exp(S scale - L) made again from the log-sum-exp L:

    dV = P^T dO    dP = dO V^T    dS = P (dP - D)    dQ = dS K scale    dK = dS^T Q scale

Each tile of scores needs five products, and by that count (2.5 times the forward) speeds are given.
But dK and dV are sums over queries, dQ is one over keys: a program that keeps a tile of keys must
send its share of dQ to others. Adding it to memory with atomics makes the result depend on chance.
Here no program writes what another one does: one walk over the queries for dK and dV (four
products), one over the keys for dQ (three), S and dP made twice. That is seven products instead of
five; a machine whose products run at 650 TFLOP/s shows 464 by the usual count at best.

A single head of a few thousand queries has fewer tiles than a GPU has SMs. Then SPLITS programs
share the walk of one tile, leave their sums in memory, and the last to arrive adds them up in the
order of the walk, so that the result does not depend on who was last.

Where the scores are transposed (keys down, queries across) all sums are plain products, with the
small operand in registers. Under a causal mask tile i of the keys has the queries after it and
tile i of the queries the keys before it: a program that does both is as long as any other (PAIRED).
Small problems need more programs instead, so there they are apart. D is a launch of its own, one
pass over O and dO at the speed of memory, or made while fp32 inputs are cut into parts (`parts`),
or, where the launch table says so, by the programs that need it, from O and dO, tile by tile.

On an H200 (bf16, causal, 16 heads, sequence 16384, d = 128, three stages): 368 TFLOP/s with tiles
of 128 x 64 and 8 warps, 297 with 64 x 32 and 4; 64 x 64 with 4 warps spills and reaches 220. One
head of 65536 at d = 64 with 64 x 64 and 4 warps: 361 with loads by descriptors, which take 43
registers less (154 instead of 197: three programs on an SM instead of two), 289 without. On Hopper
`hopper_backward`, `hopper_once` and `hopper_wide` have groups of warps that load or compute.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.flash_delta import delta_of
from lmlab.kernels.parts import add_product, in_parts, load_parts, turned
from lmlab.kernels.tiles import (
    is_last,
    keys_seen,
    leave_tile,
    load_row,
    place,
    queries_that_see,
    share_of,
    store_tile,
    sum_of_tiles,
    visible,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def walk_queries(
    grads, k_tile, v_tile, q, grad_o, o, q_strides, grad_o_strides, o_strides, batches, lse, delta,
    batch, head, columns, first, last, queries, shift, scale_log2,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr,
    OWN_DELTA: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `first` to `last` send back to one tile of keys and values.

    Scores are transposed here, keys down and queries across: both sums are then plain products.
    """
    grad_k, grad_v = grads
    for start in tl.range(first, last, WALKED):
        start = tl.multiple_of(start, WALKED)
        q_tile = load_parts(
            q, batches, q_strides, batch, head, start, queries,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, PARTS,
        )  # fmt: skip
        # Beyond the last query a log-sum-exp of infinity makes the weight zero.
        lse_row = load_row(lse, start, queries, float("inf"), WALKED, RAGGED) * LOG2E
        nothing = tl.full([KEPT, WALKED], 0.0, tl.float32)
        scores = add_product(nothing, k_tile, turned(q_tile, PARTS), PRECISION, PARTS)
        weights = tl.exp2(scores * scale_log2 - lse_row[None, :])
        if MASKED:
            rows = start + tl.arange(0, WALKED)
            weights = tl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        grad_tile = load_parts(
            grad_o, batches, grad_o_strides, batch, head, start, queries,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, PARTS,
        )  # fmt: skip
        kind: tl.constexpr = q_tile[0].dtype
        grad_v = add_product(grad_v, in_parts(weights, kind, PARTS), grad_tile, PRECISION, PARTS)
        if OWN_DELTA:
            delta_row = delta_of(
                grad_tile[0], o, o_strides, batch, head, start, queries,
                WALKED, BLOCK_D, HEAD_DIM, RAGGED,
            )  # fmt: skip
        else:
            delta_row = load_row(delta, start, queries, 0.0, WALKED, RAGGED)
        grad_weights = add_product(nothing, v_tile, turned(grad_tile, PARTS), PRECISION, PARTS)
        grad_scores = weights * (grad_weights - delta_row[None, :])
        grad_k = add_product(grad_k, in_parts(grad_scores, kind, PARTS), q_tile, PRECISION, PARTS)
    return grad_k, grad_v


@triton.jit
def walk_keys(
    grad_q, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batches,
    batch, head, rows, first, last, keys, shift, scale_log2,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `first` to `last` send back to one tile of queries."""
    for start in tl.range(first, last, WALKED):
        start = tl.multiple_of(start, WALKED)
        k_tile = load_parts(
            k, batches, k_strides, batch, head, start, keys,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, PARTS,
        )  # fmt: skip
        v_tile = load_parts(
            v, batches, v_strides, batch, head, start, keys,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR, PARTS,
        )  # fmt: skip
        nothing = tl.full([KEPT, WALKED], 0.0, tl.float32)
        scores = add_product(nothing, q_tile, turned(k_tile, PARTS), PRECISION, PARTS)
        weights = tl.exp2(scores * scale_log2 - lse_row[:, None])
        if MASKED:
            columns = start + tl.arange(0, WALKED)
            seen = visible(rows[:, None], columns[None, :], keys, shift, IS_CAUSAL, RAGGED)
            weights = tl.where(seen, weights, 0.0)
        grad_weights = add_product(nothing, grad_tile, turned(v_tile, PARTS), PRECISION, PARTS)
        grad_scores = weights * (grad_weights - delta_row[:, None])
        kind: tl.constexpr = k_tile[0].dtype
        grad_q = add_product(grad_q, in_parts(grad_scores, kind, PARTS), k_tile, PRECISION, PARTS)
    return grad_q


@triton.jit
def grads_of_keys(
    work, split, parts, arrivals, tile, batch, head,
    q, k_kept, v_kept, grad_o, o, lse, delta, grad_k, grad_v,
    q_strides, k_strides, v_strides, grad_o_strides, o_strides, grad_k_strides, grad_v_strides,
    batches, scale, heads, group, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    OWN_DELTA: tl.constexpr,
):  # fmt: skip
    """Keep one tile of keys and values, walk the queries of all heads that share them."""
    start = tile * KEPT
    columns = start + tl.arange(0, KEPT)
    first, clear = queries_that_see(start, queries, keys, KEPT, WALKED, IS_CAUSAL)
    last = queries
    if SPLITS > 1:
        first, last = share_of(first, last, split, WALKED, SPLITS)
        clear = tl.minimum(tl.maximum(clear, first), last)
    # Keys beyond the last read as zeros; what comes out in their rows is not stored.
    k_tile = load_parts(
        k_kept, batches, k_strides, batch, head, start, keys,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False, PARTS,
    )  # fmt: skip
    v_tile = load_parts(
        v_kept, batches, v_strides, batch, head, start, keys,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False, PARTS,
    )  # fmt: skip
    grads = (
        tl.full([KEPT, BLOCK_D], 0.0, tl.float32),
        tl.full([KEPT, BLOCK_D], 0.0, tl.float32),
    )
    for member in range(group):
        q_head = head * group + member
        of_pair = (batch * heads + q_head) * queries
        if IS_CAUSAL:
            grads = walk_queries(
                grads, k_tile, v_tile, q, grad_o, o, q_strides, grad_o_strides, o_strides, batches,
                lse + of_pair, delta + of_pair, batch, q_head, columns, first, clear,
                queries, keys - queries, scale * LOG2E, KEPT, WALKED, BLOCK_D, HEAD_DIM,
                True, RAGGED_QUERIES, PRECISION, DESCRIPTOR, PARTS, OWN_DELTA,
            )  # fmt: skip
        grads = walk_queries(
            grads, k_tile, v_tile, q, grad_o, o, q_strides, grad_o_strides, o_strides, batches,
            lse + of_pair, delta + of_pair, batch, q_head, columns, clear, last,
            queries, keys - queries, scale * LOG2E, KEPT, WALKED, BLOCK_D, HEAD_DIM,
            False, RAGGED_QUERIES, PRECISION, DESCRIPTOR, PARTS, OWN_DELTA,
        )  # fmt: skip
    k_sum, v_sum = grads
    complete = True
    if SPLITS > 1:
        leave_tile(k_sum, 2 * (work * SPLITS + split), parts, KEPT, BLOCK_D)
        leave_tile(v_sum, 2 * (work * SPLITS + split) + 1, parts, KEPT, BLOCK_D)
        complete = is_last(work, arrivals, SPLITS)
        if complete:
            k_sum = sum_of_tiles(2 * work * SPLITS, 2, parts, KEPT, BLOCK_D, SPLITS)
            v_sum = sum_of_tiles(2 * work * SPLITS + 1, 2, parts, KEPT, BLOCK_D, SPLITS)
    if complete:
        store_tile(grad_v, grad_v_strides, batch, head, start, keys, v_sum, KEPT, BLOCK_D, HEAD_DIM)
        k_sum = k_sum * scale
        store_tile(grad_k, grad_k_strides, batch, head, start, keys, k_sum, KEPT, BLOCK_D, HEAD_DIM)


@triton.jit
def grads_of_queries(
    work, split, parts, arrivals, tile, batch, head,
    q_kept, k, v, grad_o_kept, o, lse, delta, grad_q,
    q_strides, k_strides, v_strides, grad_o_strides, o_strides, grad_q_strides,
    batches, scale, heads, group, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    OWN_DELTA: tl.constexpr,
):  # fmt: skip
    """Keep one tile of queries, walk the keys and values that it sees."""
    start = tile * KEPT
    rows = start + tl.arange(0, KEPT)
    clear, end = keys_seen(start, queries, keys, KEPT, WALKED, IS_CAUSAL)
    first = 0
    if SPLITS > 1:
        first, end = share_of(first, end, split, WALKED, SPLITS)
        clear = tl.minimum(tl.maximum(clear, first), end)
    of_pair = (batch * heads + head) * queries
    q_tile = load_parts(
        q_kept, batches, q_strides, batch, head, start, queries,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False, PARTS,
    )  # fmt: skip
    grad_tile = load_parts(
        grad_o_kept, batches, grad_o_strides, batch, head, start, queries,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False, PARTS,
    )  # fmt: skip
    lse_row = load_row(lse + of_pair, start, queries, float("inf"), KEPT, RAGGED_QUERIES) * LOG2E
    if OWN_DELTA:
        delta_row = delta_of(
            grad_tile[0], o, o_strides, batch, head, start, queries,
            KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES,
        )  # fmt: skip
    else:
        delta_row = load_row(delta + of_pair, start, queries, 0.0, KEPT, RAGGED_QUERIES)
    total = tl.full([KEPT, BLOCK_D], 0.0, tl.float32)
    total = walk_keys(
        total, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batches, batch,
        head // group, rows, first, clear, keys, keys - queries, scale * LOG2E,
        KEPT, WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, False, False, PRECISION, DESCRIPTOR, PARTS,
    )  # fmt: skip
    if IS_CAUSAL or RAGGED_KEYS:
        total = walk_keys(
            total, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batches,
            batch, head // group, rows, clear, end, keys, keys - queries, scale * LOG2E,
            KEPT, WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, True, RAGGED_KEYS,
            PRECISION, DESCRIPTOR, PARTS,
        )  # fmt: skip
    complete = True
    if SPLITS > 1:
        leave_tile(total, 2 * (work * SPLITS + split), parts, KEPT, BLOCK_D)
        complete = is_last(work, arrivals, SPLITS)
        if complete:
            total = sum_of_tiles(2 * work * SPLITS, 2, parts, KEPT, BLOCK_D, SPLITS)
    if complete:
        total = total * scale
        store_tile(
            grad_q, grad_q_strides, batch, head, start, queries, total, KEPT, BLOCK_D, HEAD_DIM
        )


@triton.jit(do_not_specialize=["batches", "kv_pairs", "kv_heads", "abreast"])
def flash_backward_kernel(
    q, k, v, grad_o, q_kept, k_kept, v_kept, grad_o_kept, o, lse, delta, grad_q, grad_k, grad_v,
    parts, arrivals, q_strides, k_strides, v_strides, grad_o_strides, o_strides,
    grad_q_strides, grad_k_strides, grad_v_strides,
    batches, scale, kv_pairs, kv_heads, group, abreast, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PAIRED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, OWN_DELTA: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of queries: one after the other or side by side.

    PAIRED programs do tile i of the keys, then tile i of the queries. Under a causal mask the
    first is long where the second is short, so all programs are equally long. Without it the
    first programs have the keys and the others the queries: twice as many for a small problem, and
    where that is still too few SPLITS of them share a walk. With OWN_DELTA `delta` is not read.
    """
    work = tl.program_id(0) // SPLITS
    split = tl.program_id(0) - work * SPLITS
    heads = kv_heads * group
    key_tiles = (keys + KEPT - 1) // KEPT
    query_tiles = (queries + KEPT - 1) // KEPT
    if PAIRED:
        longer = tl.maximum(key_tiles, query_tiles)
        tile, batch, head = place(work, longer, kv_pairs, kv_heads, abreast, False)
        has_keys = tile < key_tiles
        has_queries = tile < query_tiles
    else:
        of_keys = key_tiles * kv_pairs
        has_keys = work < of_keys
        has_queries = work >= of_keys
        if has_keys:
            tile, batch, head = place(work, key_tiles, kv_pairs, kv_heads, abreast, False)
        else:
            tile, batch, head = place(
                work - of_keys, query_tiles, kv_pairs * group, heads, abreast * group, IS_CAUSAL
            )
    if has_keys:
        grads_of_keys(
            work, split, parts, arrivals, tile, batch, head,
            q, k_kept, v_kept, grad_o, o, lse, delta, grad_k, grad_v,
            q_strides, k_strides, v_strides, grad_o_strides, o_strides,
            grad_k_strides, grad_v_strides,
            batches, scale, heads, group, queries, keys, KEPT, WALKED,
            BLOCK_D, HEAD_DIM, IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR,
            PARTS, SPLITS, OWN_DELTA,
        )  # fmt: skip
    if has_queries:
        grads_of_queries(
            work, split, parts, arrivals, tile, batch, head,
            q_kept, k, v, grad_o_kept, o, lse, delta, grad_q,
            q_strides, k_strides, v_strides, grad_o_strides, o_strides, grad_q_strides,
            batches, scale, heads, group, queries, keys, KEPT, WALKED,
            BLOCK_D, HEAD_DIM, IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR,
            PARTS, SPLITS, OWN_DELTA,
        )  # fmt: skip
