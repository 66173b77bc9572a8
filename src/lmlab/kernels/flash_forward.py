"""FlashAttention-2, forward: softmax(Q K^T scale) V in one launch, the scores never leave the chip.

The numbers, for one head of S queries and keys and head dimension d in 16 bit:

- products: 4 S^2 d operations, half of that under a causal mask, since tiles above the diagonal are
  never visited;
- memory: 8 S d bytes for Q, K, V and O once, so S / 4 operations a byte under the mask: from a
  thousand queries on memory is no limit, and the K and V that each tile of queries reads again come
  from the L2 (heads run in groups that fit it);
- exponentials: S^2 / 2. A Hopper SM makes 16 in a clock in which its tensor cores do 4096
  operations. At d = 64 a score costs 256 operations and one exponential: 16 clocks a tile row of
  either. So the softmax takes as long as the products, and a kernel that does one after the other
  reaches half of the peak. At d = 128 it takes half as long.

Hence the design. One exp2 and one multiply-add a score: the scale and log2(e) are one factor, taken
with the maximum. Tiles that all queries of a program see whole are walked by a loop without a mask,
the few on the diagonal or beyond the end by a second one. Q K^T of the next tile overlaps with P V
of this one; what overlaps the softmax is another program on the same SM, so tiles are as large as
two programs allow (`launch_table`). Long walks start first, or a GPU waits for the last of them.

A single head of a few thousand queries has fewer tiles than a GPU has SMs. Then SPLITS programs
share the keys of one tile. Each leaves its part in memory, and the last to arrive adds them up in
the order of the keys, so the sum does not depend on who was last.

On Hopper `hopper_forward` does the same with groups of warps that load or compute.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tiles import (
    is_last,
    keys_seen,
    load_tile,
    place,
    share_of,
    store_tile,
    visible,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def walk(
    state, q_tile, k, v, k_strides, v_strides, batch, head, rows, first, last, keys, shift,
    scale_log2,
    WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, BLIND: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Take the keys from `first` to `last` into the running softmax, tile after tile.

    BLIND: a query may have seen no key so far, which would make inf - inf of its peak.
    """
    acc, total, peak = state
    for start in tl.range(first, last, WALKED):
        start = tl.multiple_of(start, WALKED)
        k_tile = load_tile(
            k, k_strides, batch, head, start, keys, WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            columns = start + tl.arange(0, WALKED)
            seen = visible(rows[:, None], columns[None, :], keys, shift, IS_CAUSAL, RAGGED)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        floor = new_peak
        if BLIND:
            floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        # One multiply-add and one exp2 an element: the scale and log2(e) are one factor.
        weights = tl.exp2(scores * scale_log2 - floor[:, None])
        correction = tl.exp2(peak - floor)
        total = total * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        v_tile = load_tile(
            v, v_strides, batch, head, start, keys, WALKED, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR
        )
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def leave_part(
    state, work, split, parts, KEPT: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    """Write the softmax over this program's share of the keys where the last program finds it."""
    acc, total, peak = state
    rows = tl.arange(0, KEPT)
    columns = tl.arange(0, BLOCK_D)
    part = parts + (work.to(tl.int64) * SPLITS + split) * (KEPT * (BLOCK_D + 2))
    tl.store(part + rows[:, None] * BLOCK_D + columns[None, :], acc)
    tl.store(part + KEPT * BLOCK_D + rows, total)
    tl.store(part + KEPT * (BLOCK_D + 1) + rows, peak)


@triton.jit
def join_parts(work, parts, KEPT: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """The softmax over all keys, from the parts of all programs, in the order of the keys.

    Other processors wrote them: `.cg` reads the L2, never an old line of this processor's L1.
    """
    rows = tl.arange(0, KEPT)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.full([KEPT, BLOCK_D], 0.0, tl.float32)
    total = tl.full([KEPT], 0.0, tl.float32)
    peak = tl.full([KEPT], float("-inf"), tl.float32)
    for split in range(SPLITS):
        part = parts + (work.to(tl.int64) * SPLITS + split) * (KEPT * (BLOCK_D + 2))
        its_acc = tl.load(part + rows[:, None] * BLOCK_D + columns[None, :], cache_modifier=".cg")
        its_total = tl.load(part + KEPT * BLOCK_D + rows, cache_modifier=".cg")
        its_peak = tl.load(part + KEPT * (BLOCK_D + 1) + rows, cache_modifier=".cg")
        # The first part has every query's first key, so the peak is a number from there on.
        new_peak = tl.maximum(peak, its_peak)
        old_weight = tl.exp2(peak - new_peak)
        its_weight = tl.exp2(its_peak - new_peak)
        acc = acc * old_weight[:, None] + its_acc * its_weight[:, None]
        total = total * old_weight + its_total * its_weight
        peak = new_peak
    return acc, total, peak


@triton.jit
def finish(
    state, o, lse, o_strides, batch, head, heads, start, queries,
    KEPT: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of the weights; write the output and the log-sum-exp in natural log."""
    acc, total, peak = state
    mean = acc * (1.0 / total)[:, None]
    store_tile(o, o_strides, batch, head, start, queries, mean, KEPT, BLOCK_D, HEAD_DIM)
    rows = start + tl.arange(0, KEPT)
    of_pair = lse + (batch * heads + head) * queries
    tl.store(of_pair + rows, (peak + tl.log2(total)) * LN2, mask=rows < queries)


@triton.jit
def attend(
    program, q, k, v, o, lse, parts, arrivals, q_strides, k_strides, v_strides, o_strides,
    scale_log2, pairs, heads, group, abreast, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One tile of queries over the keys that it sees, or over its share of them."""
    tiles = (queries + KEPT - 1) // KEPT
    work = program // SPLITS
    split = program - work * SPLITS
    tile, batch, head = place(work, tiles, pairs, heads, abreast, IS_CAUSAL)
    start = tile * KEPT
    clear, end = keys_seen(start, queries, keys, KEPT, WALKED, IS_CAUSAL)
    first = 0
    if SPLITS > 1:
        first, end = share_of(first, end, split, WALKED, SPLITS)
        clear = tl.minimum(tl.maximum(clear, first), end)
    q_tile = load_tile(
        q, q_strides, batch, head, start, queries,
        KEPT, BLOCK_D, HEAD_DIM, RAGGED_QUERIES, DESCRIPTOR,
    )  # fmt: skip
    rows = start + tl.arange(0, KEPT)
    state = (
        tl.full([KEPT, BLOCK_D], 0.0, tl.float32),
        tl.full([KEPT], 0.0, tl.float32),
        tl.full([KEPT], float("-inf"), tl.float32),
    )
    state = walk(
        state, q_tile, k, v, k_strides, v_strides, batch, head // group, rows, first, clear,
        keys, keys - queries, scale_log2, WALKED, BLOCK_D, HEAD_DIM,
        IS_CAUSAL, False, False, False, PRECISION, DESCRIPTOR,
    )  # fmt: skip
    if IS_CAUSAL or RAGGED_KEYS:
        state = walk(
            state, q_tile, k, v, k_strides, v_strides, batch, head // group, rows, clear, end,
            keys, keys - queries, scale_log2, WALKED, BLOCK_D, HEAD_DIM,
            IS_CAUSAL, True, RAGGED_KEYS, SPLITS > 1, PRECISION, DESCRIPTOR,
        )  # fmt: skip
    complete = True
    if SPLITS > 1:
        leave_part(state, work, split, parts, KEPT, BLOCK_D, SPLITS)
        complete = is_last(work, arrivals, SPLITS)
        if complete:
            state = join_parts(work, parts, KEPT, BLOCK_D, SPLITS)
    if complete:
        finish(
            state, o, lse, o_strides, batch, head, heads, start, queries, KEPT, BLOCK_D, HEAD_DIM
        )


@triton.jit(do_not_specialize=["pairs", "heads", "group", "abreast", "programs"])
def flash_forward_kernel(
    q, k, v, o, lse, parts, arrivals, q_strides, k_strides, v_strides, o_strides,
    scale_log2, pairs, heads, group, abreast, programs, queries, keys,
    KEPT: tl.constexpr, WALKED: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED_QUERIES: tl.constexpr, RAGGED_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PERSISTENT: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Attend with every tile of queries; PERSISTENT programs take one after the other."""
    if PERSISTENT:
        for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
            attend(
                program, q, k, v, o, lse, parts, arrivals,
                q_strides, k_strides, v_strides, o_strides,
                scale_log2, pairs, heads, group, abreast, queries, keys,
                KEPT, WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS,
                SPLITS, PRECISION, DESCRIPTOR,
            )  # fmt: skip
    else:
        attend(
            tl.program_id(0), q, k, v, o, lse, parts, arrivals,
            q_strides, k_strides, v_strides, o_strides,
            scale_log2, pairs, heads, group, abreast, queries, keys,
            KEPT, WALKED, BLOCK_D, HEAD_DIM, IS_CAUSAL, RAGGED_QUERIES, RAGGED_KEYS,
            SPLITS, PRECISION, DESCRIPTOR,
        )  # fmt: skip
