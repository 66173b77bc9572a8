"""Gradients of keys and values on Hopper: keep a tile of keys, walk the queries.

See `hopper_backward` for what the two walks share, and why they are as they are.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper_backward import (
    blocks_that_see,
    make_barriers,
    make_query_tiles,
    produce,
    two_products,
    write_keys,
)
from lmlab.kernels.hopper_group import ROWS
from lmlab.kernels.tiles import place

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def walk_queries(
    grads, tiles, barriers, columns, begin, first, last, shift, scale_log2,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add what blocks `first` to `last` of the queries send back to 64 keys and values.

    Scores are transposed here, keys down and queries across: both sums are then plain products.
    """
    _, _, q_tiles, grad_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, free = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    grad_k, grad_v = grads
    for block in range(first, last):
        turn = block - begin
        slot = turn % STAGES
        scores, grad_weights = two_products(
            tiles, barriers, turn, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT
        )
        lse_row = lse_tiles.index(slot).reshape([WALKED]).load(ACROSS) * LOG2E
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = gl.exp2(scores * scale_log2 - lse_row[None, :])
        if MASKED:
            rows = block * WALKED + gl.arange(0, WALKED, ACROSS)
            weights = gl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        narrow = gl.convert_layout(weights.to(q_tiles.dtype), P_LAYOUT)
        grad_tile = grad_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_v = warpgroup_mma(narrow, grad_tile, grad_v, is_async=True)
        delta_row = delta_tiles.index(slot).reshape([WALKED]).load(ACROSS)
        grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
        grad_scores = weights * (grad_weights - delta_row[None, :])
        narrow = gl.convert_layout(grad_scores.to(q_tiles.dtype), P_LAYOUT)
        q_tile = q_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_k = warpgroup_mma(narrow, q_tile, grad_k, is_async=True)
        grad_k, grad_v = warpgroup_mma_wait(0, deps=[grad_k, grad_v])
        mbarrier.arrive(free.index(slot), count=1)
    return grad_k, grad_v


@gluon.jit
def consume_queries(
    tiles, barriers, targets, where, sizes, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and their values: one group of four warps."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = where
    first, clear, last, keys, shift = sizes
    start = start + WHICH * ROWS
    columns = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    mbarrier.wait(barriers[0], 0)
    if IS_CAUSAL:
        grads = walk_queries(
            grads, tiles, barriers, columns, first, first, clear, shift, scale * LOG2E,
            WHICH, BLOCK_D, WALKED, STAGES, True, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    grads = walk_queries(
        grads, tiles, barriers, columns, first, clear, last, shift, scale * LOG2E,
        WHICH, BLOCK_D, WALKED, STAGES, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    k_sum, v_sum = grads
    write_keys(k_sum, v_sum, targets, batch, head, start, keys, scale, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit(do_not_specialize=["pairs", "heads", "abreast"])
def hopper_keys_kernel(
    q, k, v, grad_o, lse, delta, grad_k, grad_v, grad_k_strides, grad_v_strides,
    scale, pairs, heads, abreast, queries, keys,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, 64 for each consumer."""
    KEPT: gl.constexpr = CONSUMERS * ROWS
    tiles_of_keys = (keys + KEPT - 1) // KEPT
    tile, batch, head = place(gl.program_id(0), tiles_of_keys, pairs, heads, abreast, False)
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    where = (batch, head, head, tile * KEPT)
    first, clear, last = blocks_that_see(tile, queries, keys, KEPT, WALKED, IS_CAUSAL)
    tiles = make_query_tiles((k, v), (q, grad_o), (lse, delta), CONSUMERS, WALKED, BLOCK_D, STAGES)
    barriers = make_barriers(CONSUMERS, STAGES)
    targets = (grad_k, grad_v, grad_k_strides, grad_v_strides)
    sizes = (first, clear, last, keys, keys - queries)
    # Compile-time values stay so only where the tuple is written in the call itself.
    gl.warp_specialize([
        (consume_queries, (tiles, barriers, targets, where, sizes, scale,
                           0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (consume_queries, (tiles, barriers, targets, where, sizes, scale,
                           1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (produce, ((k, v), (q, grad_o), (lse, delta), tiles, barriers, where, first, last,
                   CONSUMERS, WALKED, STAGES, True, False)),
    ], [4, 1], [240, 24])  # fmt: skip
