"""All gradients on Hopper in one walk, at head dimension 128: the groups that compute also make dQ.

`hopper_once` has a third group of warps for dQ. At head dimension 128 there are no registers for
it: the sums dK and dV of 64 keys take 128 of a thread's registers, and blocks of 64 queries want
the two groups that compute to have 240 each. So here these make dQ too. Both put their dS into
shared memory, and when both have, each multiplies all 128 keys' with one half of the columns of K:
32 registers, at a moment when those of the scores are free again.

Shares of dQ are added in memory in a fixed order, program after program, as in `hopper_once`. What
waits there is a warp by itself, the clerk: it looks how far the program before has come, lets the
groups add, and tells the next program when they have. A group only looks back, at each turn, if its
share of the turn before has arrived.
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

from lmlab.kernels.hopper_backward import make_barriers, make_tiles, produce, two_products
from lmlab.kernels.hopper_group import ROWS, write
from lmlab.kernels.hopper_sums import load_sums, make_seats, start_adding, wait_for_adds
from lmlab.kernels.tiles import place

LOG2E = gl.constexpr(1.4426950408889634)
PLACES = gl.constexpr(2)
"""Tiles of dS in shared memory: a group may be one turn ahead of the other."""
LEAVES = gl.constexpr(4)
"""Barriers by which the clerk lets groups add, used in turn."""
LAG = gl.constexpr(2)
"""Turns that the clerk is ahead: leave is there before a group asks for it."""


@gluon.jit
def half_of(tile, WHICH: gl.constexpr):
    """64 of a tile's 128 columns: in shared memory they lie together, not row by row."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return tile._reinterpret(tile.dtype, [2, ROWS, ROWS], LAYOUT).index(WHICH)


@gluon.jit
def add_half(
    share, clerk, seat, sums, sums_tiles, target, where, turn, last, tile, beyond, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    ENDS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add one half of a block's share to those of the programs before; the last one writes it."""
    leave, added = clerk
    grad_q, grad_q_strides, queries = target
    batch, head, pair, _ = where
    block = last - 1 - turn
    ACROSS: gl.constexpr = WHICH * ROWS
    row = ((pair * last + block) * 2 + WHICH) * ROWS
    if turn > 0:
        say_added(added, turn - 1)
    mbarrier.wait(leave.index(turn % LEAVES), turn // LEAVES & 1)
    if ENDS:
        if block < beyond:
            if tile > 0:
                share = share + load_sums(sums, row, ROWS, LAYOUT)
            write(
                share * scale, grad_q + ACROSS, grad_q_strides, batch, head, block * WALKED,
                queries, ROWS, HEAD_DIM - ACROSS, LAYOUT,
            )  # fmt: skip
        else:
            start_adding(share, seat, sums_tiles, row, tile == 0)
    else:
        start_adding(share, seat, sums_tiles, row, tile == 0)


@gluon.jit
def say_added(added, turn):
    """A turn later: what was started has been added by now, and the seat is free."""
    wait_for_adds(turn, 0)
    mbarrier.arrive(added.index(turn % LEAVES), count=1)


@gluon.jit
def walk_queries(
    grads, tiles, barriers, passing, clerk, seat, sums, sums_tiles, target, where, columns, first,
    last, end, shift, tile, beyond, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Turns `first` to `last`: blocks of queries from the end on, for 64 keys and values."""
    k_tiles, _, q_tiles, grad_tiles, lse_tiles, delta_tiles = tiles
    _, _, _, free = barriers
    passed, passed_ready, passed_free = passing
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    grad_k, grad_v = grads
    nothing = gl.zeros([ROWS, ROWS], gl.float32, Q_LAYOUT)
    for turn in range(first, last):
        slot = turn % STAGES
        scores, grad_weights = two_products(
            tiles, barriers, turn, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT
        )
        lse_row = lse_tiles.index(slot).reshape([WALKED]).load(ACROSS) * LOG2E
        scores = warpgroup_mma_wait(1, deps=[scores])
        weights = gl.exp2(scores * (scale * LOG2E) - lse_row[None, :])
        if MASKED:
            rows = (end - 1 - turn) * WALKED + gl.arange(0, WALKED, ACROSS)
            weights = gl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        narrow = gl.convert_layout(weights.to(q_tiles.dtype), P_LAYOUT)
        grad_tile = grad_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_v = warpgroup_mma(narrow, grad_tile, grad_v, is_async=True)
        delta_row = delta_tiles.index(slot).reshape([WALKED]).load(ACROSS)
        grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
        grad_scores = (weights * (grad_weights - delta_row[None, :])).to(q_tiles.dtype)
        spot = turn % PLACES
        mbarrier.wait(passed_free.index(spot), (turn // PLACES & 1) ^ 1)
        passed.index(2 * spot + WHICH).store(grad_scores)
        fence_async_shared()
        mbarrier.arrive(passed_ready.index(spot), count=1)
        narrow = gl.convert_layout(grad_scores, P_LAYOUT)
        q_tile = q_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_k = warpgroup_mma(narrow, q_tile, grad_k, is_async=True)
        mbarrier.wait(passed_ready.index(spot), turn // PLACES & 1)
        share = nothing
        for tile_of_keys in gl.static_range(2):
            turned = passed.index(2 * spot + tile_of_keys).permute((1, 0))
            half = half_of(k_tiles.index(tile_of_keys), WHICH)
            share = warpgroup_mma(turned, half, share, use_acc=tile_of_keys > 0, is_async=True)
        grad_k, grad_v, share = warpgroup_mma_wait(0, deps=[grad_k, grad_v, share])
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.arrive(passed_free.index(spot), count=1)
        add_half(
            share, clerk, seat, sums, sums_tiles, target, where, turn, end, tile, beyond, scale,
            WHICH, BLOCK_D, HEAD_DIM, WALKED, ENDS, Q_LAYOUT,
        )  # fmt: skip
    return grad_k, grad_v


@gluon.jit
def consume(
    tiles, barriers, passing, clerk, seats, sums, sums_tiles, target, targets, where, sizes, tile,
    scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and their values, and half the columns of the queries' shares."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = where
    first, clear, last, beyond, keys, shift = sizes
    grad_k, grad_v, grad_k_strides, grad_v_strides = targets
    start = start + WHICH * ROWS
    columns = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    grads = (zero, zero)
    plain = last - gl.maximum(clear, gl.minimum(beyond, last))
    mbarrier.wait(barriers[0], 0)
    grads = walk_queries(
        grads, tiles, barriers, passing, clerk, seats.index(WHICH), sums, sums_tiles, target, where,
        columns, 0, plain, last, shift, tile, beyond, scale,
        WHICH, BLOCK_D, HEAD_DIM, WALKED, STAGES, False, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    grads = walk_queries(
        grads, tiles, barriers, passing, clerk, seats.index(WHICH), sums, sums_tiles, target, where,
        columns, plain, last - first, last, shift, tile, beyond, scale,
        WHICH, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL, True, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    if last > first:
        say_added(clerk[1], last - first - 1)
    k_sum, v_sum = grads
    write(v_sum, grad_v, grad_v_strides, batch, head, start, keys, BLOCK_D, HEAD_DIM, O_LAYOUT)
    k_sum = k_sum * scale
    write(k_sum, grad_k, grad_k_strides, batch, head, start, keys, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit
def tell(added, own, turn, last, beyond):
    """Once both groups have added a turn's share, let the next program know, every second turn."""
    block = last - 1 - turn
    mbarrier.wait(added.index(turn % LEAVES), turn // LEAVES & 1)
    if ((turn % 2 == 1) & (block > beyond)) | (block == beyond):
        gl.atomic_xchg(own, turn + 1, sem="release")


@gluon.jit
def keep_order(clerk, progress, pair, sizes, tile, last_tile):
    """One warp: let the groups add to a block when the program before has, and tell the next one.

    `progress` has for each program how many blocks it has added; the next one reads it and sets it
    back to zero for the launch after.
    """
    leave, added = clerk
    first, _, last, beyond, _, _ = sizes
    own = progress + pair * (last_tile + 1) + tile
    before = own - 1
    added_before = 0
    turns = last - first
    for turn in range(0, turns):
        if turn >= LAG:
            tell(added, own, turn - LAG, last, beyond)
        if tile > 0:
            while added_before <= turn:
                added_before = gl.atomic_add(before, 0, sem="acquire")
        mbarrier.arrive(leave.index(turn % LEAVES), count=1)
    for turn in range(gl.maximum(turns - LAG, 0), turns):
        tell(added, own, turn, last, beyond)
    if tile > 0:
        gl.store(before, 0)


@gluon.jit
def make_passing(dtype: gl.constexpr, WALKED: gl.constexpr):
    """Shared memory in which both groups find all of dS, and barriers: it is there, it is read."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    passed = gl.allocate_shared_memory(dtype, [2 * PLACES, ROWS, WALKED], LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for spot in gl.static_range(PLACES):
        mbarrier.init(ready.index(spot), count=2)
        mbarrier.init(free.index(spot), count=2)
    return passed, ready, free


@gluon.jit
def make_clerk():
    """Barriers between the clerk and the groups: leave to add, and added."""
    leave = gl.allocate_shared_memory(gl.int64, [LEAVES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [LEAVES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(LEAVES):
        mbarrier.init(leave.index(number), count=1)
        mbarrier.init(added.index(number), count=2)
    return leave, added


@gluon.jit(do_not_specialize=["pairs", "heads", "abreast"])
def hopper_wide_kernel(
    q, k, v, grad_o, lse, delta, sums, sums_tiles, progress, grad_q, grad_k, grad_v,
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
    shift = keys - queries
    first = 0
    clear = 0
    # The first block that sees a key of the next program; blocks before it end here.
    beyond = 0
    last = (queries + WALKED - 1) // WALKED
    if IS_CAUSAL:
        first = gl.maximum(tile * KEPT - shift, 0) // WALKED
        clear = (gl.maximum(tile * KEPT + KEPT - 1 - shift, 0) + WALKED - 1) // WALKED
        clear = gl.minimum(clear, last)
        beyond = gl.maximum((tile + 1) * KEPT - shift, 0) // WALKED
    if tile == tiles_of_keys - 1:
        beyond = last
    a_kept, b_kept, a_walked, b_walked = make_tiles(
        (k, v), (q, grad_o), CONSUMERS, WALKED, BLOCK_D, STAGES
    )
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, WALKED], lse.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, WALKED], delta.layout)
    tiles = (a_kept, b_kept, a_walked, b_walked, lse_tiles, delta_tiles)
    passing = make_passing(q.dtype, WALKED)
    clerk = make_clerk()
    seats = make_seats(sums_tiles, CONSUMERS, ROWS)
    barriers = make_barriers(CONSUMERS, STAGES)
    targets = (grad_k, grad_v, grad_k_strides, grad_v_strides)
    target = (grad_q, grad_q_strides, queries)
    sizes = (first, clear, last, beyond, keys, shift)
    pair = batch * heads + head
    place_q = (batch, head, pair, tile * KEPT)
    # Compile-time values stay so only where the tuple is written in the call itself.
    gl.warp_specialize([
        (consume, (tiles, barriers, passing, clerk, seats, sums, sums_tiles, target, targets,
                   place_q, sizes, tile, scale, 0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (consume, (tiles, barriers, passing, clerk, seats, sums, sums_tiles, target, targets,
                   place_q, sizes, tile, scale, 1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (keep_order, (clerk, progress, pair, sizes, tile, tiles_of_keys - 1)),
        (produce, ((k, v), (q, grad_o), (lse, delta), tiles, barriers, where, first, last,
                   CONSUMERS, WALKED, STAGES, True, True)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
