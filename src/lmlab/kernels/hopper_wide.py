"""All gradients on Hopper in one walk at head dimension 128, where registers are short.

What `hopper_once` says of one walk holds here: five products a tile instead of seven, dQ added in a
fixed order by programs that follow each other. But the sums of 64 keys and values take 128 of a
thread's 240 registers, and nothing is left for a third group. So the two groups that make dS also
make dQ, half of its columns each, from the dS of both. What lets that pay:

- dQ of a turn is multiplied in the turn after it. dS lies in shared memory for two turns, and a
  group waits only for what the other did in the turn before.
- The scores of the next turn are under way while a share is added, so the tensor cores are busy
  meanwhile. They are done when the loop turns: the compiler serialises what is in flight there.
- Who computes asks other processors nothing. One warp looks how far the program before has come
  (`look`), another tells the next one (`tell`); both answers take a microsecond and reach those who
  compute, or come from them, through barriers in shared memory.
- Numbers are added in fours (`hopper_sums`).

On an H200 (bf16, causal, 16 heads, sequence 16384) five products are 2.75 TFLOP. The study has 4.55
ms with D, 604 TFLOP/s, beside 4.62 of cuDNN; two walks, measured before, took 5.01.

Tried on such a machine under steady load, which runs hotter and slower; milliseconds, beside cuDNN
and two walks in the same run, for a gradient of ones:

- 4.73 beside 4.91 and 5.18; with a random gradient 4.99 beside 5.25 and 5.51. No adding, so wrong,
  4.58; adding without waiting for the program before, so wrong, 4.64.
- Three slots of queries instead of two 5.36, dS of three turns 5.41. Without adding three slots are
  faster than two (4.41 against 4.58): shared memory beyond 164 KiB is taken from the L1, and what
  is added goes through there.
- Eight heads side by side instead of sixteen 4.97. D as the start of a product instead of a
  subtraction after it 5.31: the product then waits for D.
- Random gradient, beside 5.36 of cuDNN: numbers added one by one 5.84, in twos 5.47.
- Slots of dO freed before those of Q, one barrier more: 5.20 where this took 4.95.
- One barrier a turn for all, after the adding: 5.44 where this took 4.91; and dQ before dK, so that
  the adding begins earlier, 5.05; and dS freed apart 5.04 where this took 4.97, but one head of
  65536 then takes 5.23 instead of 5.54.

The compiler spills 184 bytes of a thread, most of them around the loop over the diagonal, two turns
of a program; the long loop reads seven numbers back each turn.
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

from lmlab.kernels.hopper_backward import (
    blocks_that_see,
    make_barriers,
    make_passing,
    make_query_tiles,
    write_keys,
)
from lmlab.kernels.hopper_group import ROWS, write
from lmlab.kernels.hopper_sums import add_fours, cells_of, load_fours, store_fours
from lmlab.kernels.tiles import place

LOG2E = gl.constexpr(1.4426950408889634)
SLOTS = gl.constexpr(2)
"""Turns whose dS is kept: this one's, and that of the one before, from which dQ is made."""
RING = gl.constexpr(4)
"""Turns whose adding is allowed ahead of time."""
HALF = gl.constexpr(64)
"""Columns of dQ that one group makes."""
FAR = gl.constexpr(2**30)
"""More turns than a walk has: their quotient is zero, which the compiler cannot know. Otherwise it
keeps the eight addresses of a product for the whole loop, in registers that there are not."""

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def start_scores(
    tiles, barriers, turn,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the product of 64 keys with the queries of a turn."""
    k_tiles, _, q_tiles, _, _, _ = tiles
    slot = turn % STAGES
    mbarrier.wait(barriers[1].index(slot), turn // STAGES & 1)
    nothing = gl.zeros([ROWS, WALKED], gl.float32, S_LAYOUT)
    kept = k_tiles.index(WHICH + turn // FAR).reshape([ROWS, BLOCK_D])
    walked = q_tiles.index(slot).reshape([WALKED, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(kept, walked, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_share(
    tiles, passing, turn,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, Q_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start half of the columns of what 128 keys send back to the queries of a turn."""
    k_tiles, _, _, _, _, _ = tiles
    passed, passed_ready, _ = passing
    # The turn before the first one finds its barrier a phase ahead and passes.
    around = turn + 2 * SLOTS
    seat = around % SLOTS
    mbarrier.wait(passed_ready.index(seat), around // SLOTS & 1)
    nothing = gl.zeros([WALKED, HALF], gl.float32, Q_LAYOUT)
    upper = passed.index(2 * seat).permute((1, 0))
    keys = k_tiles.index(0).reshape([ROWS, BLOCK_D]).slice(WHICH * HALF, HALF, dim=1)
    share = warpgroup_mma(upper, keys, nothing, use_acc=False, is_async=True)
    lower = passed.index(2 * seat + 1).permute((1, 0))
    keys = k_tiles.index(1).reshape([ROWS, BLOCK_D]).slice(WHICH * HALF, HALF, dim=1)
    return warpgroup_mma(lower, keys, share, is_async=True)


@gluon.jit
def add_share(
    share, turn, target, escort, where, tile, last, beyond, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    FINAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add half of one block's share to those of the programs before; the last one writes dQ.

    `target` is where sums and dQ lie, `escort` the barriers of those who look and tell.
    """
    sums, grad_q, grad_q_strides, queries = target
    go, done = escort
    batch, head, pair, _ = where
    block = last - 1 - turn
    cells = cells_of(sums, (pair * last + block) * 2 + WHICH, LAYOUT)
    mbarrier.wait(go.index(turn % RING), turn // RING & 1)
    if FINAL and block < beyond:
        if tile > 0:
            share = share + load_fours(cells)
        share = share * scale
        start = block * WALKED
        corner = grad_q + WHICH * HALF
        write(
            share, corner, grad_q_strides, batch, head, start, queries, HALF,
            HEAD_DIM - WHICH * HALF, LAYOUT,
        )  # fmt: skip
    elif tile > 0:
        add_fours(cells, share)
    else:
        store_fours(cells, share)
    group_barrier()
    mbarrier.arrive(done.index(turn % RING), count=1)


@gluon.jit
def walk_queries(
    scores, grads, tiles, barriers, passing, target, escort, where, columns, tile, first, last,
    end, beyond, shift, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, FINAL: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Turns `first` to `last`: blocks of queries from the end on, for 64 keys and values.

    `scores` are those of the first turn, and what is returned those of the turn after the last.
    FINAL is for turns whose blocks may see no key of the next program.
    """
    _, v_tiles, q_tiles, grad_tiles, lse_tiles, delta_tiles = tiles
    _, _, b_ready, free = barriers
    passed, passed_ready, passed_free = passing
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    grad_k, grad_v = grads
    for turn in range(first, last):
        slot = turn % STAGES
        mbarrier.wait(b_ready.index(slot), turn // STAGES & 1)
        nothing = gl.zeros([ROWS, WALKED], gl.float32, S_LAYOUT)
        kept = v_tiles.index(WHICH).reshape([ROWS, BLOCK_D])
        grad_tile = grad_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_weights = warpgroup_mma(
            kept, grad_tile.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        lse_row = lse_tiles.index(slot).reshape([WALKED]).load(ACROSS) * LOG2E
        weights = gl.exp2(scores * (scale * LOG2E) - lse_row[None, :])
        if MASKED:
            rows = (end - 1 - turn) * WALKED + gl.arange(0, WALKED, ACROSS)
            weights = gl.where(columns[:, None] <= rows[None, :] + shift, weights, 0.0)
        narrow = gl.convert_layout(weights.to(q_tiles.dtype), P_LAYOUT)
        grad_v = warpgroup_mma(narrow, grad_tile, grad_v, is_async=True)
        delta_row = delta_tiles.index(slot).reshape([WALKED]).load(ACROSS)
        grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
        grad_scores = (weights * (grad_weights - delta_row[None, :])).to(q_tiles.dtype)
        seat = turn % SLOTS
        mbarrier.wait(passed_free.index(seat), ((turn + 1) // SLOTS & 1) ^ 1)
        passed.index(2 * seat + WHICH).store(grad_scores)
        fence_async_shared()
        mbarrier.arrive(passed_ready.index(seat), count=1)
        narrow = gl.convert_layout(grad_scores, P_LAYOUT)
        q_tile = q_tiles.index(slot).reshape([WALKED, BLOCK_D])
        grad_k = warpgroup_mma(narrow, q_tile, grad_k, is_async=True)
        share = start_share(tiles, passing, turn - 1, WHICH, BLOCK_D, WALKED, S_LAYOUT)
        grad_v = warpgroup_mma_wait(3, deps=[grad_v])
        scores = start_scores(tiles, barriers, turn + 1, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT)
        grad_k, share = warpgroup_mma_wait(1, deps=[grad_k, share])
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.arrive(passed_free.index((turn + SLOTS - 1) % SLOTS), count=1)
        if turn > 0:
            add_share(
                share, turn - 1, target, escort, where, tile, end, beyond, scale,
                WHICH, BLOCK_D, HEAD_DIM, WALKED, FINAL, S_LAYOUT,
            )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, grad_k, grad_v


@gluon.jit
def consume(
    tiles, barriers, passing, escort, targets, target, where, sizes, tile, last_tile, beyond, scale,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, WALKED: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and their values, and half of what 128 keys send to the queries."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = where
    first, clear, last, keys, shift = sizes
    start = start + WHICH * ROWS
    columns = start + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    mbarrier.wait(barriers[0], 0)
    scores = start_scores(tiles, barriers, 0, WHICH, BLOCK_D, WALKED, STAGES, S_LAYOUT)
    scores = warpgroup_mma_wait(0, deps=[scores])
    # The last tile's blocks are all final, and the second loop is the one for those.
    turns = last - clear
    if tile == last_tile:
        turns = 0
    scores, k_sum, v_sum = walk_queries(
        scores, (zero, zero), tiles, barriers, passing, target, escort, where, columns, tile,
        0, turns, last, beyond, shift, scale,
        WHICH, BLOCK_D, HEAD_DIM, WALKED, STAGES, False, False, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    scores, k_sum, v_sum = walk_queries(
        scores, (k_sum, v_sum), tiles, barriers, passing, target, escort, where, columns, tile,
        turns, last - first, last, beyond, shift, scale,
        WHICH, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL, True, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    if last > first:
        share = start_share(tiles, passing, last - first - 1, WHICH, BLOCK_D, WALKED, S_LAYOUT)
        share = warpgroup_mma_wait(0, deps=[share])
        add_share(
            share, last - first - 1, target, escort, where, tile, last, beyond, scale,
            WHICH, BLOCK_D, HEAD_DIM, WALKED, True, S_LAYOUT,
        )  # fmt: skip
    write_keys(k_sum, v_sum, targets, batch, head, start, keys, scale, BLOCK_D, HEAD_DIM, O_LAYOUT)


@gluon.jit
def look(escort, before, tile, turns):
    """Let a turn's share be added once the program before has added its own: one warp.

    `go` has two arrivals a turn, this one's and that of `tell`, who has then passed on the turn
    that had the barrier before. So no barrier is two phases ahead of anyone who waits for it.
    """
    go, _ = escort
    added_before = 0
    for turn in range(0, turns):
        mbarrier.wait(go.index(turn % RING), (turn // RING & 1) ^ 1)
        if tile > 0:
            while added_before <= turn:
                added_before = gl.atomic_add(before, 0, sem="acquire")
        mbarrier.arrive(go.index(turn % RING), count=1)
    if tile > 0:
        gl.store(before, 0)


@gluon.jit
def tell(escort, own, turns, told):
    """Tell the next program how many of its own turns are added here: one warp."""
    go, done = escort
    for turn in range(0, RING):
        mbarrier.arrive(go.index(turn), count=1)
    for turn in range(0, turns):
        mbarrier.wait(done.index(turn % RING), turn // RING & 1)
        if turn < told:
            gl.atomic_xchg(own, turn + 1, sem="release")
        mbarrier.arrive(go.index(turn % RING), count=1)


@gluon.jit
def produce(
    kept, walked, rows, tiles, barriers, where, first, last,
    WALKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load keys and values, then blocks of queries from the end on, and one block more.

    The scores of a turn are started in the one before, so there is a block of queries after the
    last one: whatever lies there, for scores that nobody uses.
    """
    k_tiles, v_tiles, q_tiles, grad_tiles, lse_tiles, delta_tiles = tiles
    kept_ready, a_ready, b_ready, free = barriers
    batch, head, _, start = where
    SIZE: gl.constexpr = walked[0].block_type.nbytes + 4 * WALKED
    mbarrier.expect(kept_ready, 4 * kept[0].block_type.nbytes)
    for which in gl.static_range(2):
        corner = [batch, head, start + which * ROWS, 0]
        tma.async_copy_global_to_shared(kept[0], corner, kept_ready, k_tiles.index(which))
        tma.async_copy_global_to_shared(kept[1], corner, kept_ready, v_tiles.index(which))
    for turn in range(0, last - first + 1):
        block = gl.maximum(last - 1 - turn, 0)
        slot = turn % STAGES
        # A slot's first use passes at once: an unused barrier counts as one phase ahead.
        mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
        corner = [batch, head, block * WALKED, 0]
        edge = [batch, head, block * WALKED]
        a_full, b_full = a_ready.index(slot), b_ready.index(slot)
        mbarrier.expect(a_full, SIZE)
        tma.async_copy_global_to_shared(walked[0], corner, a_full, q_tiles.index(slot))
        tma.async_copy_global_to_shared(rows[0], edge, a_full, lse_tiles.index(slot))
        if turn < last - first:
            mbarrier.expect(b_full, SIZE)
            tma.async_copy_global_to_shared(walked[1], corner, b_full, grad_tiles.index(slot))
            tma.async_copy_global_to_shared(rows[1], edge, b_full, delta_tiles.index(slot))


@gluon.jit
def make_escort():
    """Barriers of a turn's share: it may be added, both halves are added."""
    go = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        mbarrier.init(go.index(slot), count=2)
        mbarrier.init(done.index(slot), count=2)
    return go, done


@gluon.jit(do_not_specialize=["pairs", "heads", "abreast"])
def hopper_wide_kernel(
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
    pair = batch * heads + head
    where = (batch, head, pair, tile * KEPT)
    first, clear, last = blocks_that_see(tile, queries, keys, KEPT, WALKED, IS_CAUSAL)
    # The first block that sees a key of the next program; blocks before it end here.
    beyond = 0
    if IS_CAUSAL:
        beyond = gl.maximum((tile + 1) * KEPT - (keys - queries), 0) // WALKED
    if tile == tiles_of_keys - 1:
        beyond = last
    tiles = make_query_tiles((k, v), (q, grad_o), (lse, delta), CONSUMERS, WALKED, BLOCK_D, STAGES)
    passing = make_passing(q.dtype, WALKED, SLOTS, 2)
    escort = make_escort()
    barriers = make_barriers(CONSUMERS, STAGES)
    targets = (grad_k, grad_v, grad_k_strides, grad_v_strides)
    target = (sums, grad_q, grad_q_strides, queries)
    sizes = (first, clear, last, keys, keys - queries)
    own = progress + pair * tiles_of_keys + tile
    turns = gl.maximum(last - first, 0)
    # Compile-time values stay so only where the tuple is written in the call itself.
    gl.warp_specialize([
        (consume, (tiles, barriers, passing, escort, targets, target, where, sizes,
                   tile, tiles_of_keys - 1, beyond, scale,
                   0, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (consume, (tiles, barriers, passing, escort, targets, target, where, sizes,
                   tile, tiles_of_keys - 1, beyond, scale,
                   1, BLOCK_D, HEAD_DIM, WALKED, STAGES, IS_CAUSAL)),
        (look, (escort, own - 1, tile, turns)),
        (tell, (escort, own, turns, last - beyond)),
        (produce, ((k, v), (q, grad_o), (lse, delta), tiles, barriers, where, first, last,
                   WALKED, STAGES)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
