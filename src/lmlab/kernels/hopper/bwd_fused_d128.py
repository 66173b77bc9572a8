"""All gradients on Hopper in one pass at head dimension 128, where registers are scarce.

As in `bwd_fused`, five products per tile instead of seven, and dQ is added in a fixed order by
programs that follow each other. But the accumulators of 64 keys (dK and dV) take 128 of a thread's
240 registers, and nothing is left for a third warpgroup. So the two consumers that compute dS also
compute dQ, half of its columns each, from the dS of both. What makes that pay:

- dQ of an iteration is computed in the next one. dS stays in shared memory for two iterations, and
  a consumer waits only for what the other did in the previous one.
- S of the next iteration is in flight while dQ is accumulated, so the tensor cores stay busy. It
  is complete at the loop edge, where the compiler serializes whatever is still in flight.
- Consumers never wait for other SMs. One warp polls the previous program (`wait_previous`), another
  signals the next (`signal_next`); both round trips take about a microsecond, and the consumers see
  them only as barriers in shared memory.
- Contributions are added four numbers at a time (`dq_accum`).

Tile: BLOCK_N = 128 keys resident, BLOCK_M = 64 queries streamed. Two stages, although three hide
more latency: shared memory beyond 164 KiB is taken from the L1, through which the additions go. The
compiler spills 184 bytes per thread, mostly around the masked loop over the diagonal, which has two
iterations; the long loop reloads seven numbers per iteration.
"""

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

from lmlab.kernels.hopper.bwd_common import (
    alloc_barriers,
    alloc_dkdv_tiles,
    alloc_ds_pipe,
    query_blocks,
    store_dkdv,
)
from lmlab.kernels.hopper.dq_accum import accum_pointers, load_v4, red_add_v4, store_v4
from lmlab.kernels.hopper.warpgroup import WG_ROWS, store_rows
from lmlab.kernels.tile_ops import tile_of_program

LOG2E = gl.constexpr(1.4426950408889634)
DS_STAGES = gl.constexpr(2)
"""dS of this iteration and of the previous one, from which dQ is computed."""
ORDER_STAGES = gl.constexpr(4)
"""Iterations whose addition may be granted ahead of time."""
DQ_COLS = gl.constexpr(64)
"""Columns of dQ that one consumer computes."""
OPAQUE = gl.constexpr(2**30)
"""More steps than a loop has, so step // OPAQUE is zero, which the compiler cannot know. Otherwise
it hoists the eight addresses of a product out of the loop, into registers that do not exist."""

warpgroup_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def start_s(
    tiles, barriers, step,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue S of one iteration: 64 keys by BLOCK_M queries."""
    k_tiles, _, q_tiles, _, _, _ = tiles
    stage = step % STAGES
    mbarrier.wait(barriers[1].index(stage), step // STAGES & 1)
    zeros = gl.zeros([WG_ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    resident = k_tiles.index(WG + step // OPAQUE).reshape([WG_ROWS, BLOCK_D])
    streamed = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(resident, streamed, zeros, use_acc=False, is_async=True)


@gluon.jit
def start_dq(
    tiles, ds_pipe, step,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, Q_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue half the columns of the contribution of 128 keys to dQ of one iteration."""
    k_tiles, _, _, _, _, _ = tiles
    ds_tiles, ds_full, _ = ds_pipe
    # Step -1 finds its barrier one phase ahead and passes.
    ring_step = step + 2 * DS_STAGES
    ds_stage = ring_step % DS_STAGES
    mbarrier.wait(ds_full.index(ds_stage), ring_step // DS_STAGES & 1)
    zeros = gl.zeros([BLOCK_M, DQ_COLS], gl.float32, Q_LAYOUT)
    ds_top = ds_tiles.index(2 * ds_stage).permute((1, 0))
    k_half = k_tiles.index(0).reshape([WG_ROWS, BLOCK_D]).slice(WG * DQ_COLS, DQ_COLS, dim=1)
    dq_part = warpgroup_mma(ds_top, k_half, zeros, use_acc=False, is_async=True)
    ds_bottom = ds_tiles.index(2 * ds_stage + 1).permute((1, 0))
    k_half = k_tiles.index(1).reshape([WG_ROWS, BLOCK_D]).slice(WG * DQ_COLS, DQ_COLS, dim=1)
    return warpgroup_mma(ds_bottom, k_half, dq_part, is_async=True)


@gluon.jit
def accumulate_dq(
    dq_part, step, dq_output, order, coords, tile, last, final_end, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    FINAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add half the columns of this key tile's contribution to dQ; the last program stores dQ.

    `order` holds the barriers shared with `wait_previous` and `signal_next`.
    """
    dq_accum, dq, dq_strides, queries = dq_output
    may_add, added = order
    batch, head, batch_head, _ = coords
    block = last - 1 - step
    pointers = accum_pointers(dq_accum, (batch_head * last + block) * 2 + WG, LAYOUT)
    mbarrier.wait(may_add.index(step % ORDER_STAGES), step // ORDER_STAGES & 1)
    if FINAL and block < final_end:
        if tile > 0:
            dq_part = dq_part + load_v4(pointers)
        dq_part = dq_part * scale
        start = block * BLOCK_M
        half = dq + WG * DQ_COLS
        store_rows(
            dq_part, half, dq_strides, batch, head, start, queries, DQ_COLS,
            HEAD_DIM - WG * DQ_COLS, LAYOUT,
        )  # fmt: skip
    elif tile > 0:
        red_add_v4(pointers, dq_part)
    else:
        store_v4(pointers, dq_part)
    warpgroup_barrier()
    mbarrier.arrive(added.index(step % ORDER_STAGES), count=1)


@gluon.jit
def query_loop(
    s, grads, tiles, barriers, ds_pipe, dq_output, order, coords, offs_n, tile, first, last,
    end, final_end, shift, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, FINAL: gl.constexpr, RAGGED_KEYS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps [first, last) of 64 keys: query blocks from the last backwards.

    `s` is S of step `first`; S of step `last` is returned. FINAL: dQ of some blocks is complete
    here, because they see no key of the next program.
    """
    _, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    _, _, b_full, empty = barriers
    ds_tiles, ds_full, ds_empty = ds_pipe
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dk, dv = grads
    for step in range(first, last):
        stage = step % STAGES
        mbarrier.wait(b_full.index(stage), step // STAGES & 1)
        zeros = gl.zeros([WG_ROWS, BLOCK_M], gl.float32, S_LAYOUT)
        resident = v_tiles.index(WG).reshape([WG_ROWS, BLOCK_D])
        do_tile = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        dp = warpgroup_mma(resident, do_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse_vec = lse_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT) * LOG2E
        p = s * (scale * LOG2E) - lse_vec[None, :]
        if RAGGED_KEYS:
            p = gl.minimum(p, 0.0)
        p = gl.exp2(p)
        if MASKED:
            offs_m = (end - 1 - step) * BLOCK_M + gl.arange(0, BLOCK_M, COL_LAYOUT)
            p = gl.where(offs_n[:, None] <= offs_m[None, :] + shift, p, 0.0)
        operand = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT)
        dv = warpgroup_mma(operand, do_tile, dv, is_async=True)
        delta_vec = delta_tiles.index(stage).reshape([BLOCK_M]).load(COL_LAYOUT)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - delta_vec[None, :])).to(q_tiles.dtype)
        ds_stage = step % DS_STAGES
        mbarrier.wait(ds_empty.index(ds_stage), ((step + 1) // DS_STAGES & 1) ^ 1)
        ds_tiles.index(2 * ds_stage + WG).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(ds_stage), count=1)
        operand = gl.convert_layout(ds, P_LAYOUT)
        q_tile = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        dk = warpgroup_mma(operand, q_tile, dk, is_async=True)
        dq_part = start_dq(tiles, ds_pipe, step - 1, WG, BLOCK_D, BLOCK_M, S_LAYOUT)
        dv = warpgroup_mma_wait(3, deps=[dv])
        s = start_s(tiles, barriers, step + 1, WG, BLOCK_D, BLOCK_M, STAGES, S_LAYOUT)
        dk, dq_part = warpgroup_mma_wait(1, deps=[dk, dq_part])
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(ds_empty.index((step + DS_STAGES - 1) % DS_STAGES), count=1)
        if step > 0:
            accumulate_dq(
                dq_part, step - 1, dq_output, order, coords, tile, end, final_end, scale,
                WG, BLOCK_D, HEAD_DIM, BLOCK_M, FINAL, S_LAYOUT,
            )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
    return s, dk, dv


@gluon.jit
def consumer(
    tiles, barriers, ds_pipe, order, outputs, dq_output, coords, bounds, tile, last_tile,
    final_end, scale,
    WG: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, RAGGED_KEYS: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half the columns of the part of dQ from 128 keys."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    batch, head, _, start = coords
    first, unmasked, last, shift = bounds
    start = start + WG * WG_ROWS
    offs_n = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    mbarrier.wait(barriers[0], 0)
    s = start_s(tiles, barriers, 0, WG, BLOCK_D, BLOCK_M, STAGES, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=[s])
    # All blocks of the last key tile are final, which is what the second loop handles.
    steps = last - unmasked
    if tile == last_tile:
        steps = 0
    s, dk_acc, dv_acc = query_loop(
        s, (zero, zero), tiles, barriers, ds_pipe, dq_output, order, coords, offs_n, tile,
        0, steps, last, final_end, shift, scale,
        WG, BLOCK_D, HEAD_DIM, BLOCK_M, STAGES, False, False, RAGGED_KEYS, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    s, dk_acc, dv_acc = query_loop(
        s, (dk_acc, dv_acc), tiles, barriers, ds_pipe, dq_output, order, coords, offs_n, tile,
        steps, last - first, last, final_end, shift, scale,
        WG, BLOCK_D, HEAD_DIM, BLOCK_M, STAGES, IS_CAUSAL, True, RAGGED_KEYS, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    if last > first:
        dq_part = start_dq(tiles, ds_pipe, last - first - 1, WG, BLOCK_D, BLOCK_M, S_LAYOUT)
        dq_part = warpgroup_mma_wait(0, deps=[dq_part])
        accumulate_dq(
            dq_part, last - first - 1, dq_output, order, coords, tile, last, final_end, scale,
            WG, BLOCK_D, HEAD_DIM, BLOCK_M, True, S_LAYOUT,
        )  # fmt: skip
    grads, staging = (dk_acc, dv_acc), tiles[1].index(WG)
    store_dkdv(grads, outputs, staging, batch, head, start, scale, BLOCK_D, True, True)


@gluon.jit
def wait_previous(order, prev_semaphore, tile, steps):
    """Grant each addition to dQ once the previous program has made its own: one warp.

    `may_add` takes two arrivals per step, one from here and one from `signal_next`, which by then
    has signalled the step that used the barrier before. So no barrier gets two phases ahead of a
    thread that waits for it.
    """
    may_add, _ = order
    done_before = 0
    for step in range(0, steps):
        mbarrier.wait(may_add.index(step % ORDER_STAGES), (step // ORDER_STAGES & 1) ^ 1)
        if tile > 0:
            while done_before <= step:
                done_before = gl.atomic_add(prev_semaphore, 0, sem="acquire")
        mbarrier.arrive(may_add.index(step % ORDER_STAGES), count=1)
    if tile > 0:
        gl.store(prev_semaphore, 0)


@gluon.jit
def signal_next(order, own_semaphore, steps, signalled):
    """Publish the number of steps added, as far as the next program shares them: one warp."""
    may_add, added = order
    for step in range(0, ORDER_STAGES):
        mbarrier.arrive(may_add.index(step), count=1)
    for step in range(0, steps):
        mbarrier.wait(added.index(step % ORDER_STAGES), step // ORDER_STAGES & 1)
        if step < signalled:
            gl.atomic_xchg(own_semaphore, step + 1, sem="release")
        mbarrier.arrive(may_add.index(step % ORDER_STAGES), count=1)


@gluon.jit
def producer(
    resident, streamed, vectors, tiles, barriers, coords, first, last,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load K and V, then stream query blocks from the last backwards, and one block more.

    S is issued one iteration ahead, so the last iteration needs some block to issue an unused S.
    """
    k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    resident_full, a_full, b_full, empty = barriers
    batch, head, _, start = coords
    STAGE_BYTES: gl.constexpr = streamed[0].block_type.nbytes + 4 * BLOCK_M
    mbarrier.expect(resident_full, 4 * resident[0].block_type.nbytes)
    for wg in gl.static_range(2):
        corner = [batch, head, start + wg * WG_ROWS, 0]
        tma.async_copy_global_to_shared(resident[0], corner, resident_full, k_tiles.index(wg))
        tma.async_copy_global_to_shared(resident[1], corner, resident_full, v_tiles.index(wg))
    for step in range(0, last - first + 1):
        block = gl.maximum(last - 1 - step, 0)
        stage = step % STAGES
        # The first wait on each stage passes: a fresh barrier counts as one phase ahead.
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        corner = [batch, head, block * BLOCK_M, 0]
        edge = [batch, head, block * BLOCK_M]
        a_barrier, b_barrier = a_full.index(stage), b_full.index(stage)
        mbarrier.expect(a_barrier, STAGE_BYTES)
        tma.async_copy_global_to_shared(streamed[0], corner, a_barrier, q_tiles.index(stage))
        tma.async_copy_global_to_shared(vectors[0], edge, a_barrier, lse_tiles.index(stage))
        if step < last - first:
            mbarrier.expect(b_barrier, STAGE_BYTES)
            tma.async_copy_global_to_shared(streamed[1], corner, b_barrier, do_tiles.index(stage))
            tma.async_copy_global_to_shared(vectors[1], edge, b_barrier, delta_tiles.index(stage))


@gluon.jit
def alloc_order_barriers():
    """Per step: the addition to dQ is granted, and both halves are added."""
    may_add = gl.allocate_shared_memory(gl.int64, [ORDER_STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [ORDER_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(ORDER_STAGES):
        mbarrier.init(may_add.index(stage), count=2)
        mbarrier.init(added.index(stage), count=2)
    return may_add, added


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_fused_d128_kernel(
    q, k, v, do, lse, delta, dk, dv, dq, dq_accum, semaphores, dq_strides,
    scale, batch_heads, heads, l2_heads, queries, keys,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, RAGGED_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 128 rows: its dK and dV, and its part of dQ."""
    BLOCK_N: gl.constexpr = CONSUMERS * WG_ROWS
    key_tiles = (keys + BLOCK_N - 1) // BLOCK_N
    tile, batch, head = tile_of_program(
        gl.program_id(0), key_tiles, batch_heads, heads, l2_heads, False
    )
    batch, head = batch.to(gl.int32), head.to(gl.int32)
    batch_head = batch * heads + head
    coords = (batch, head, batch_head, tile * BLOCK_N)
    first, unmasked, last = query_blocks(tile, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    # The first query block that sees a key of the next program; earlier ones are final here.
    final_end = 0
    if IS_CAUSAL:
        final_end = gl.maximum((tile + 1) * BLOCK_N - (keys - queries), 0) // BLOCK_M
    if tile == key_tiles - 1:
        final_end = last
    tiles = alloc_dkdv_tiles(
        (k, v), (q, do), (lse, delta), CONSUMERS, BLOCK_M, BLOCK_D, STAGES, True
    )
    ds_pipe = alloc_ds_pipe(q.dtype, BLOCK_M, DS_STAGES, 2)
    order = alloc_order_barriers()
    barriers = alloc_barriers(CONSUMERS, STAGES)
    outputs = (dk, dv)
    dq_output = (dq_accum, dq, dq_strides, queries)
    bounds = (first, unmasked, last, keys - queries)
    own_semaphore = semaphores + batch_head * key_tiles + tile
    steps = gl.maximum(last - first, 0)
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (consumer, (tiles, barriers, ds_pipe, order, outputs, dq_output, coords, bounds,
                    tile, key_tiles - 1, final_end, scale,
                    0, BLOCK_D, HEAD_DIM, BLOCK_M, STAGES, IS_CAUSAL, RAGGED_KEYS)),
        (consumer, (tiles, barriers, ds_pipe, order, outputs, dq_output, coords, bounds,
                    tile, key_tiles - 1, final_end, scale,
                    1, BLOCK_D, HEAD_DIM, BLOCK_M, STAGES, IS_CAUSAL, RAGGED_KEYS)),
        (wait_previous, (order, own_semaphore - 1, tile, steps)),
        (signal_next, (order, own_semaphore, steps, last - final_end)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last,
                    BLOCK_M, STAGES)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
