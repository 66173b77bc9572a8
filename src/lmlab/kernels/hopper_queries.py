"""Gradient of queries on Hopper: keep a tile of queries, walk the keys and values.

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

from lmlab.kernels.hopper_backward import make_barriers, make_tiles, produce, two_products
from lmlab.kernels.hopper_group import ROWS, write
from lmlab.kernels.tiles import place

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def walk_keys(
    grad_q, tiles, barriers, lse_row, delta_row, rows, first, last, keys, shift, scale_log2,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add what blocks `first` to `last` of the keys send back to 64 queries."""
    _, _, k_tiles, _, _, _ = tiles
    _, _, _, free = barriers
    for block in range(first, last):
        slot = block % STAGES
        scores, grad_weights = two_products(
            tiles, barriers, block, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT
        )
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = gl.exp2(scores * scale_log2 - lse_row[:, None])
        if MASKED:
            columns = block * WALKED + gl.arange(0, WALKED, gl.SliceLayout(0, S_LAYOUT))
            seen = (columns < keys)[None, :]
            if IS_CAUSAL:
                seen = seen & (columns[None, :] <= rows[:, None] + shift)
            weights = gl.where(seen, weights, 0.0)
        grad_weights = warpgroup_mma_wait(0, deps=[grad_weights])
        grad_scores = weights * (grad_weights - delta_row[:, None])
        narrow = gl.convert_layout(
            grad_scores.to(k_tiles.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2)
        )
        k_tile = k_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_q = warpgroup_mma(narrow, k_tile, grad_q, is_async=True)
        grad_q = warpgroup_mma_wait(0, deps=[grad_q])
        mbarrier.arrive(free.index(slot), count=1)
    return grad_q


@gluon.jit
def consume_keys(
    tiles, barriers, targets, where, sizes, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradient of 64 queries: one group of four warps."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = where
    clear, last, heads, queries, keys = sizes
    grad_q, grad_q_strides, lse, delta = targets
    start = start + WHICH * ROWS
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    of_pair = (batch.to(gl.int64) * heads + head) * queries
    # Beyond the last query a log-sum-exp of infinity makes the weight zero.
    lse_row = gl.load(lse + of_pair + rows, mask=rows < queries, other=float("inf")) * LOG2E
    delta_row = gl.load(delta + of_pair + rows, mask=rows < queries, other=0.0)
    total = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    mbarrier.wait(barriers[0], 0)
    total = walk_keys(
        total, tiles, barriers, lse_row, delta_row, rows, 0, clear, keys, keys - queries,
        scale * LOG2E, WHICH, BLOCK_D, WALKED, STAGES, IS_CAUSAL, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    total = walk_keys(
        total, tiles, barriers, lse_row, delta_row, rows, clear, last, keys, keys - queries,
        scale * LOG2E, WHICH, BLOCK_D, WALKED, STAGES, IS_CAUSAL, True, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    total = total * scale
    write(total, grad_q, grad_q_strides, batch, head, start, queries, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit(do_not_specialize=["pairs", "heads", "group", "abreast"])
def hopper_queries_kernel(
    q, k, v, grad_o, lse, delta, grad_q, grad_q_strides,
    scale, pairs, heads, group, abreast, queries, keys,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, 64 for each consumer."""
    KEPT: gl.constexpr = CONSUMERS * ROWS
    tiles_of_queries = (queries + KEPT - 1) // KEPT
    tile, batch, head = place(gl.program_id(0), tiles_of_queries, pairs, heads, abreast, IS_CAUSAL)
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    where = (batch, head, head // group, tile * KEPT)
    clear = keys
    end = keys
    if IS_CAUSAL:
        clear = gl.minimum(keys, tile * KEPT + 1 + keys - queries)
        end = gl.minimum(keys, tile * KEPT + KEPT + keys - queries)
    last = (end + WALKED - 1) // WALKED
    a_kept, b_kept, a_walked, b_walked = make_tiles(
        (q, grad_o), (k, v), CONSUMERS, WALKED, BLOCK_D, STAGES
    )
    tiles = (a_kept, b_kept, a_walked, b_walked, a_walked, b_walked)  # the last two are not used
    barriers = make_barriers(CONSUMERS, STAGES)
    targets = (grad_q, grad_q_strides, lse, delta)
    sizes = (clear // WALKED, last, heads, queries, keys)
    gl.warp_specialize([
        (consume_keys, (tiles, barriers, targets, where, sizes, scale,
                        0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (consume_keys, (tiles, barriers, targets, where, sizes, scale,
                        1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (produce, ((q, grad_o), (k, v), (k, v), tiles, barriers, where, 0, last,
                   CONSUMERS, WALKED, STAGES, False, False)),
    ], [4, 1], [240, 24])  # fmt: skip
