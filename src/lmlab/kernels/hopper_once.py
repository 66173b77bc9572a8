"""All gradients on Hopper in one walk: five products for each tile of scores instead of seven.

The walk over the queries (`hopper_keys`) has all that dQ needs, dS, but for one tile of keys only:
dQ of a query is a sum over the programs of all keys that it sees. Here a third group of warps takes
dS from shared memory, multiplies it with the keys, and adds the product to what the programs before
have left in memory. The order of these sums is fixed, so the result is the same bits each time:
program j adds to a block of queries only after program j - 1 has, which a counter tells. The first
program stores instead of adding, the last one scales and writes dQ itself, so nothing is cleared
before and nothing converted after.

Waiting costs little because all programs walk the queries in one direction, from the end to the
diagonal: program j follows j - 1 through the same blocks, a few turns behind. That also lets the
longest programs start first, and a block of queries is read by all programs of a head at about the
same time, from the L2. A program only waits for programs that started before it, so there is
always one that runs. With few heads all programs of a head start at once and the last one waits for
all the others: one head of 32768 takes 0.94 ms, in two walks 0.87, so there is a line for it in the
launch table.

Sums of 128 keys and 64 queries in flight take most of the registers: a group that computes has 200,
the one that adds 88, which suffices for a head dimension of 64.

Tried on an H200 (bf16, causal, 16 heads, sequence 16384), milliseconds with D, beside 3.04 of cuDNN
and 3.62 of two walks: 2.81; with two slots for dS instead of three 2.85; with sums in panels of
eight columns, added one by one, 2.81, row by row 3.36; the copy engine adding from shared memory
(cp.reduce.async.bulk) 3.44; no adding at all, so wrong, about 2.7. With sums row by row, telling
the next program every turn 3.90, every second 3.45, every fourth 3.43. Eight heads side by side
instead of sixteen 3.04 where this took 2.87, four 3.22.

Tried on a day on which this kernel took 3.80 and cuDNN 3.33: turns in pairs, the products of the
second begun under the first, 3.76 to 4.04; no third group, dQ made by the two in turn with keys and
values in registers, 3.70, but with one head 0.78 to 0.95 against 0.59 to 0.76.

At head dimension 128 there are no registers for a third group; `hopper_wide` does it with two.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper_backward import (
    blocks_that_see,
    make_barriers,
    make_passing,
    make_query_tiles,
    produce,
    two_products,
    write_keys,
)
from lmlab.kernels.hopper_group import ROWS, write
from lmlab.kernels.hopper_sums import add_fours, cells_of, load_fours, store_fours
from lmlab.kernels.tiles import place

LOG2E = gl.constexpr(1.4426950408889634)
SLOTS = gl.constexpr(3)
"""Turns by which those who compute dS may be ahead of the one who adds."""

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def walk_queries(
    grads, tiles, barriers, passing, columns, first, last, end, shift, scale_log2,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Turns `first` to `last`: blocks of queries from the end on, for 64 keys and values."""
    _, _, q_tiles, grad_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, free = barriers
    passed, passed_ready, passed_free = passing
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    grad_k, grad_v = grads
    for turn in range(first, last):
        slot = turn % STAGES
        scores, grad_weights = two_products(
            tiles, barriers, turn, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT
        )
        lse_row = lse_tiles.index(slot).reshape([WALKED]).load(ACROSS) * LOG2E
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = gl.exp2(scores * scale_log2 - lse_row[None, :])
        if MASKED:
            rows = (end - 1 - turn) * WALKED + gl.arange(0, WALKED, ACROSS)
            weights = gl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        narrow = gl.convert_layout(weights.to(q_tiles.dtype), P_LAYOUT)
        grad_tile = grad_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_v = warpgroup_mma(narrow, grad_tile, grad_v, is_async=True)
        delta_row = delta_tiles.index(slot).reshape([WALKED]).load(ACROSS)
        grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
        grad_scores = (weights * (grad_weights - delta_row[None, :])).to(q_tiles.dtype)
        seat = turn % SLOTS
        mbarrier.wait(passed_free.index(seat), (turn // SLOTS & 1) ^ 1)
        passed.index(2 * seat + WHICH).store(grad_scores)
        fence_async_shared()
        mbarrier.arrive(passed_ready.index(seat), count=1)
        narrow = gl.convert_layout(grad_scores, P_LAYOUT)
        q_tile = q_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_k = warpgroup_mma(narrow, q_tile, grad_k, is_async=True)
        grad_k, grad_v = warpgroup_mma_wait(0, deps=[grad_k, grad_v])
        mbarrier.arrive(free.index(slot), count=1)
    return grad_k, grad_v


@gluon.jit
def consume(
    tiles, barriers, passing, targets, where, sizes, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and their values, and dS for those of the queries."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = where
    first, clear, last, keys, shift = sizes
    start = start + WHICH * ROWS
    columns = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    mbarrier.wait(barriers[0], 0)
    grads = walk_queries(
        grads, tiles, barriers, passing, columns, 0, last - clear, last, shift, scale * LOG2E,
        WHICH, BLOCK_D, WALKED, STAGES, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    if IS_CAUSAL:
        grads = walk_queries(
            grads, tiles, barriers, passing, columns, last - clear, last - first, last, shift,
            scale * LOG2E, WHICH, BLOCK_D, WALKED, STAGES, True, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    k_sum, v_sum = grads
    write_keys(k_sum, v_sum, targets, batch, head, start, keys, scale, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit
def add_share(
    share, sums, grad_q, grad_q_strides, batch, head, of_block, block, tile, is_last, queries,
    scale,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add one block's share to those of the programs before; the last one writes the gradient."""
    cells = cells_of(sums, of_block, LAYOUT)
    if is_last:
        if tile > 0:
            share = share + load_fours(cells)
        share = share * scale
        start = block * WALKED
        write(share, grad_q, grad_q_strides, batch, head, start, queries, BLOCK_D, HEAD_DIM, LAYOUT)
    elif tile > 0:
        add_fours(cells, share)
    else:
        store_fours(cells, share)


@gluon.jit
def add_up(
    tiles, barriers, passing, sums, progress, target, where, sizes, tile, last_tile, scale,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr, KEPT: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """What 128 keys send back to each block of queries: one group of four warps.

    `progress` has for each program how many blocks it has added; the next one reads it and sets it
    back to zero for the launch after. Both looking and telling wait for the L2, so a program looks
    only when it has come to the end of what it knows, and tells every second turn.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    k_tiles, _, _, _, _, _ = tiles
    passed, passed_ready, passed_free = passing
    grad_q, grad_q_strides, queries = target
    batch, head, pair, _ = where
    first, _, last, _, shift = sizes
    own = progress + pair * (last_tile + 1) + tile
    before = own - 1
    # The first block that sees a key of the next program; blocks before it end here.
    beyond = 0
    if IS_CAUSAL:
        beyond = gl.maximum((tile + 1) * KEPT - shift, 0) // WALKED
    if tile == last_tile:
        beyond = last
    nothing = gl.zeros([WALKED, BLOCK_D], gl.float32, LAYOUT)
    mbarrier.wait(barriers[0], 0)
    added_before = 0
    for turn in range(0, last - first):
        block = last - 1 - turn
        seat = turn % SLOTS
        mbarrier.wait(passed_ready.index(seat), turn // SLOTS & 1)
        upper = passed.index(2 * seat).permute((1, 0))
        share = warpgroup_mma(
            upper, k_tiles.index(0).reshape([ROWS, BLOCK_D]), nothing, use_acc=False, is_async=True
        )
        lower = passed.index(2 * seat + 1).permute((1, 0))
        share = warpgroup_mma(
            lower, k_tiles.index(1).reshape([ROWS, BLOCK_D]), share, is_async=True
        )
        share = warpgroup_mma_wait(0, deps=[share])
        mbarrier.arrive(passed_free.index(seat), count=1)
        if tile > 0:
            while added_before <= turn:
                added_before = gl.atomic_add(before, 0, sem="acquire")
        add_share(
            share, sums, grad_q, grad_q_strides, batch, head, pair * last + block, block, tile,
            block < beyond, queries, scale, BLOCK_D, HEAD_DIM, WALKED, LAYOUT,
        )  # fmt: skip
        if ((turn % 2 == 1) & (block > beyond)) | (block == beyond):
            group_barrier()  # all threads have written before one of them says so
            gl.atomic_xchg(own, turn + 1, sem="release")
    if tile > 0:
        gl.store(before, 0)


@gluon.jit(do_not_specialize=["pairs", "heads", "abreast"])
def hopper_once_kernel(
    q, k, v, grad_o, lse, delta, sums, progress, grad_q, grad_k, grad_v,
    grad_q_strides, grad_k_strides, grad_v_strides,
    scale, pairs, heads, abreast, queries, keys,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of 128 keys and values, and their share of those of the queries."""
    KEPT: gl.constexpr = CONSUMERS * ROWS
    tiles_of_keys = (keys + KEPT - 1) // KEPT
    tile, batch, head = place(gl.program_id(0), tiles_of_keys, pairs, heads, abreast, False)
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    where = (batch, head, head, tile * KEPT)
    first, clear, last = blocks_that_see(tile, queries, keys, KEPT, WALKED, IS_CAUSAL)
    tiles = make_query_tiles((k, v), (q, grad_o), (lse, delta), CONSUMERS, WALKED, BLOCK_D, STAGES)
    passing = make_passing(q.dtype, WALKED, SLOTS, 1)
    barriers = make_barriers(CONSUMERS, STAGES)
    targets = (grad_k, grad_v, grad_k_strides, grad_v_strides)
    target = (grad_q, grad_q_strides, queries)
    sizes = (first, clear, last, keys, keys - queries)
    place_q = (batch, head, batch * heads + head, 0)
    # Compile-time values stay so only where the tuple is written in the call itself.
    gl.warp_specialize([
        (consume, (tiles, barriers, passing, targets, where, sizes, scale,
                   0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (consume, (tiles, barriers, passing, targets, where, sizes, scale,
                   1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (add_up, (tiles, barriers, passing, sums, progress, target, place_q, sizes,
                  tile, tiles_of_keys - 1, scale, BLOCK_D, HEAD_DIM, WALKED, KEPT, IS_CAUSAL)),
        (produce, ((k, v), (q, grad_o), (lse, delta), tiles, barriers, where, first, last,
                   CONSUMERS, WALKED, STAGES, True, True)),
    ], [4, 4, 1], [200, 88, 24])  # fmt: skip
