"""FlashAttention-2, backward: dQ, dK and dV from the log-sum-exp alone, no score ever stored.

The weights come back from one number a query, P = exp(scores - lse), so backward multiplies again
what forward had: five products instead of two, 5 B H S^2 d FLOPs under a causal mask, 2.5 times
forward's. A tile of keys gathers dK and dV over the queries that see it; a tile of queries gathers
dQ over the keys that it sees. Doing both in one pass would need atomic additions into dQ, whose
order differs from run to run; so each program does one tile of keys and then one of queries,
recomputing the weights for the second: seven products instead of five, no atomics, the same bits
every time, and one launch after the small one for delta = rowsum(O dO).
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tiles import keys_seen, load_row, load_tile, place, store_tile, visible

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["pairs", "heads"])
def delta_kernel(
    o, grad_o, delta, o_strides, grad_o_strides, pairs, heads, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Sum over the head dimension of output times its gradient, one number a query."""
    tiles = (queries + ROWS - 1) // ROWS
    tile, batch, head = place(tl.program_id(0), tiles, pairs, heads, 1, False)
    start = tile * ROWS
    o_tile = load_tile(
        o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    grad_tile = load_tile(
        grad_o, grad_o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    sums = tl.sum(o_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    rows = start + tl.arange(0, ROWS)
    tl.store(delta + (batch * heads + head) * queries + rows, sums, mask=rows < queries)


@triton.jit
def walk_queries(
    grads, k_tile, v_tile, q, grad_o, q_strides, grad_o_strides, lse, delta, batch, head, columns,
    first, last, queries, shift, scale_log2,
    WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `first` to `last` send back to one tile of keys and values.

    Scores are transposed here, keys down and queries across: both sums are then plain products.
    """
    grad_k, grad_v = grads
    for start in tl.range(first, last, WALKED):
        start = tl.multiple_of(start, WALKED)
        q_tile = load_tile(
            q, q_strides, batch, head, start, queries,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR,
        )  # fmt: skip
        # Beyond the last query a log-sum-exp of infinity makes the weight zero.
        lse_row = load_row(lse, start, queries, float("inf"), WALKED, RAGGED) * LOG2E
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        weights = tl.exp2(scores * scale_log2 - lse_row[None, :])
        if MASKED:
            rows = start + tl.arange(0, WALKED)
            weights = tl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        grad_tile = load_tile(
            grad_o, grad_o_strides, batch, head, start, queries,
            WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR,
        )  # fmt: skip
        grad_v = tl.dot(weights.to(grad_tile.dtype), grad_tile, grad_v, input_precision=PRECISION)
        delta_row = load_row(delta, start, queries, 0.0, WALKED, RAGGED)
        grad_weights = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta_row[None, :])
        grad_k = tl.dot(grad_scores.to(q_tile.dtype), q_tile, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def walk_keys(
    grad_q, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batch, head, rows,
    first, last, keys, shift, scale_log2,
    WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `first` to `last` send back to one tile of queries."""
    for start in tl.range(first, last, WALKED):
        start = tl.multiple_of(start, WALKED)
        k_tile = load_tile(
            k, k_strides, batch, head, start, keys, WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        v_tile = load_tile(
            v, v_strides, batch, head, start, keys, WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        weights = tl.exp2(scores * scale_log2 - lse_row[:, None])
        if MASKED:
            columns = start + tl.arange(0, WALKED)
            seen = visible(rows[:, None], columns[None, :], keys, shift, IS_CAUSAL, RAGGED)
            weights = tl.where(seen, weights, 0.0)
        grad_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta_row[:, None])
        grad_q = tl.dot(grad_scores.to(k_tile.dtype), k_tile, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit
def queries_that_see(
    start, queries, keys, ROWS: tl.constexpr, STEP: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """The first query that sees a tile of keys, and the first from which on all see all of it.

    Both are multiples of STEP, the second no further than the end of the queries.
    """
    first = 0
    clear = 0
    if IS_CAUSAL:
        shift = keys - queries
        end = (queries + STEP - 1) // STEP * STEP
        first = tl.maximum(start - shift, 0) // STEP * STEP
        clear = (tl.maximum(start + ROWS - 1 - shift, 0) + STEP - 1) // STEP * STEP
        clear = tl.minimum(clear, end)
    return first, clear


@triton.jit
def grads_of_keys(
    tile, batch, head, q, k_kept, v_kept, grad_o, lse, delta, grad_k, grad_v,
    q_strides, k_strides, v_strides, grad_o_strides, grad_k_strides, grad_v_strides,
    scale, heads, group, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Keep one tile of keys and values, walk the queries of all heads that share them."""
    start = tile * KEPT
    columns = start + tl.arange(0, KEPT)
    first, clear = queries_that_see(start, queries, keys, KEPT, WALKED, IS_CAUSAL)
    # Keys beyond the last read as zeros; what comes out in their rows is not stored.
    k_tile = load_tile(
        k_kept, k_strides, batch, head, start, keys, KEPT, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False
    )
    v_tile = load_tile(
        v_kept, v_strides, batch, head, start, keys, KEPT, BLOCK_D, HEAD_DIM, RAGGED_KEYS, False
    )
    grads = (
        tl.full([KEPT, BLOCK_D], 0.0, tl.float32),
        tl.full([KEPT, BLOCK_D], 0.0, tl.float32),
    )
    for member in range(group):
        q_head = head * group + member
        of_pair = (batch * heads + q_head) * queries
        if IS_CAUSAL:
            grads = walk_queries(
                grads, k_tile, v_tile, q, grad_o, q_strides, grad_o_strides,
                lse + of_pair, delta + of_pair, batch, q_head, columns, first, clear,
                queries, keys - queries, scale * LOG2E, WALKED, BLOCK_D, HEAD_DIM,
                True, RAGGED_QUERIES, PRECISION, DESCRIPTOR,
            )  # fmt: skip
        grads = walk_queries(
            grads, k_tile, v_tile, q, grad_o, q_strides, grad_o_strides,
            lse + of_pair, delta + of_pair, batch, q_head, columns, clear, queries,
            queries, keys - queries, scale * LOG2E, WALKED, BLOCK_D, HEAD_DIM,
            False, RAGGED_QUERIES, PRECISION, DESCRIPTOR,
        )  # fmt: skip
    k_sum, v_sum = grads
    store_tile(grad_v, grad_v_strides, batch, head, start, keys, v_sum, KEPT, BLOCK_D, HEAD_DIM)
    k_sum = k_sum * scale
    store_tile(grad_k, grad_k_strides, batch, head, start, keys, k_sum, KEPT, BLOCK_D, HEAD_DIM)


@triton.jit
def grads_of_queries(
    tile, batch, head, q_kept, k, v, grad_o_kept, lse, delta, grad_q,
    q_strides, k_strides, v_strides, grad_o_strides, grad_q_strides,
    scale, heads, group, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Keep one tile of queries, walk the keys and values that it sees."""
    start = tile * KEPT
    rows = start + tl.arange(0, KEPT)
    clear, end = keys_seen(start, queries, keys, KEPT, WALKED, IS_CAUSAL)
    of_pair = (batch * heads + head) * queries
    q_tile = load_tile(
        q_kept, q_strides, batch, head, start, queries,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False,
    )  # fmt: skip
    grad_tile = load_tile(
        grad_o_kept, grad_o_strides, batch, head, start, queries,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, False,
    )  # fmt: skip
    lse_row = load_row(lse + of_pair, start, queries, float("inf"), KEPT, RAGGED_QUERIES) * LOG2E
    delta_row = load_row(delta + of_pair, start, queries, 0.0, KEPT, RAGGED_QUERIES)
    total = tl.full([KEPT, BLOCK_D], 0.0, tl.float32)
    total = walk_keys(
        total, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batch,
        head // group, rows, 0, clear, keys, keys - queries, scale * LOG2E,
        WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, False, False, PRECISION, DESCRIPTOR,
    )  # fmt: skip
    if IS_CAUSAL or RAGGED_KEYS:
        total = walk_keys(
            total, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, batch,
            head // group, rows, clear, end, keys, keys - queries, scale * LOG2E,
            WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, True, RAGGED_KEYS, PRECISION, DESCRIPTOR,
        )  # fmt: skip
    total = total * scale
    store_tile(grad_q, grad_q_strides, batch, head, start, queries, total, KEPT, BLOCK_D, HEAD_DIM)


@triton.jit(do_not_specialize=["kv_pairs", "kv_heads", "abreast"])
def flash_backward_kernel(
    q, k, v, grad_o, q_kept, k_kept, v_kept, grad_o_kept, lse, delta, grad_q, grad_k, grad_v,
    q_strides, k_strides, v_strides, grad_o_strides,
    grad_q_strides, grad_k_strides, grad_v_strides,
    scale, kv_pairs, kv_heads, group, abreast, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    PAIRED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of queries: one after the other or side by side.

    PAIRED programs do tile i of the keys, then tile i of the queries. Under a causal mask the
    first is long where the second is short, so all programs are equally long. Without it the
    first programs have the keys and the others the queries: twice as many for a small problem.
    """
    program = tl.program_id(0)
    heads = kv_heads * group
    key_tiles = (keys + KEPT - 1) // KEPT
    query_tiles = (queries + KEPT - 1) // KEPT
    if PAIRED:
        longer = tl.maximum(key_tiles, query_tiles)
        tile, batch, head = place(program, longer, kv_pairs, kv_heads, abreast, False)
        has_keys = tile < key_tiles
        has_queries = tile < query_tiles
    else:
        of_keys = key_tiles * kv_pairs
        has_keys = program < of_keys
        has_queries = program >= of_keys
        if has_keys:
            tile, batch, head = place(program, key_tiles, kv_pairs, kv_heads, abreast, False)
        else:
            tile, batch, head = place(
                program - of_keys, query_tiles, kv_pairs * group, heads, abreast * group, IS_CAUSAL
            )
    if has_keys:
        grads_of_keys(
            tile, batch, head, q, k_kept, v_kept, grad_o, lse, delta, grad_k, grad_v,
            q_strides, k_strides, v_strides, grad_o_strides, grad_k_strides, grad_v_strides,
            scale, heads, group, queries, keys, KEPT, WALKED, BLOCK_D, HEAD_DIM,
            IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR,
        )  # fmt: skip
    if has_queries:
        grads_of_queries(
            tile, batch, head, q_kept, k, v, grad_o_kept, lse, delta, grad_q,
            q_strides, k_strides, v_strides, grad_o_strides, grad_q_strides,
            scale, heads, group, queries, keys, KEPT, WALKED, BLOCK_D, HEAD_DIM,
            IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS, PRECISION, DESCRIPTOR,
        )  # fmt: skip
