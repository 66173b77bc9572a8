"""Warp-specialized FlashAttention forward for Hopper: 2 producer warps, 2 or 3 consumer warpgroups.

The portable kernel (`flash_forward`) waits for Q K^T before the softmax and for the softmax before
P V; only another program on the SM fills the gap. Triton's compiler places those waits, so this
kernel is written in Gluon, where warpgroups and barriers are explicit.

- One producer warp loads K and V by TMA into a ring of STAGES buffers, another loads Q. They keep
  24 registers per thread (32 with three consumers) and leave the rest to the consumers.
- A consumer warpgroup owns 64 query rows. It issues Q K^T of block j and P V of block j - 1
  together and runs the softmax of block j as soon as the first is done, while the tensor cores work
  on the second. The other warpgroups do the same, out of phase: with PINGPONG they take turns
  issuing products, so that one computes its softmax while the tensor cores serve another.
- Barriers: a stage is `full` when its bytes have arrived and `empty` when every consumer has read
  it. The phase bit flips each time round the ring.
- Programs are persistent: while the consumers finish one query tile and store it (by TMA, from the
  shared memory of its Q), the producers already load the next. Without that, starting and ending a
  program would take a third of the time at a thousand keys. There is one per SM, or, where loops
  are short and small tiles need few registers, two: four consumers hide more latency.

BLOCK_M (query rows) is 64 per consumer, BLOCK_N (key rows) the length of a K/V block.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code=assignment
# ruff: noqa: RUF005 (no starred expressions in kernels)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper.warpgroup import (
    WG_ROWS,
    alloc_barriers,
    begin_tma_store,
    key_blocks,
    key_mask,
    load_chunks,
    start_product,
    start_scores,
    zero_chunks,
)
from lmlab.kernels.tile_ops import tile_of_program, vector_offset

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def work_item(wave, sizes, SHAPE: gl.constexpr):
    """This program's query tile in a wave: its batch, head, first row and number of key blocks.

    Tiles are numbered from the longest to the shortest; every other wave is dealt out in reverse,
    so that all programs get about the same work.
    """
    place, programs, batch_heads, heads, l2_heads, queries, keys = sizes
    BLOCK_M: gl.constexpr = SHAPE.CONSUMERS * WG_ROWS
    tiles = (queries + BLOCK_M - 1) // BLOCK_M
    if wave % 2 == 1:
        place = programs - 1 - place
    number = wave * programs + place
    last = tiles * batch_heads - 1
    tile, batch, head = tile_of_program(
        gl.minimum(number, last), tiles, batch_heads, heads, l2_heads, SHAPE.IS_CAUSAL
    )
    start = tile * BLOCK_M
    _, blocks = key_blocks(start, queries, keys, BLOCK_M, SHAPE)
    if number > last:  # nothing is left for this program
        blocks = 0
    return batch.to(gl.int32), head.to(gl.int32), start, blocks


@gluon.jit
def q_producer(q, tensors, sizes, waves, SHAPE: gl.constexpr):
    """One warp: load each consumer's rows of Q as soon as one of its SLOTS is free.

    Consumers get them one by one, so that they stay out of phase from one query tile to the next.
    """
    q_tiles, _, _, barriers, _, _ = tensors
    q_full, q_empty, _, _, _, _, _ = barriers
    for wave in range(waves):
        batch, head, start, blocks = work_item(wave, sizes, SHAPE)
        if blocks > 0:
            for wg in gl.static_range(SHAPE.CONSUMERS):
                # The first wait passes: a fresh barrier's previous phase counts as complete.
                slot = wg * SHAPE.SLOTS + wave % SHAPE.SLOTS
                mbarrier.wait(q_empty.index(slot), (wave // SHAPE.SLOTS & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), SHAPE.CHUNKS * q.block_type.nbytes)
                corner = (batch, head, start + wg * WG_ROWS)
                load_chunks(q, corner, q_full.index(slot), q_tiles, slot, SHAPE)


@gluon.jit
def kv_producer(k, v, tensors, sizes, waves, group_size, SHAPE: gl.constexpr):
    """One warp: for each query tile, load K and V block by block into empty stages."""
    _, k_tiles, v_tiles, barriers, _, _ = tensors
    _, _, k_full, k_empty, v_full, v_empty, _ = barriers
    step = 0
    for wave in range(waves):
        batch, head, _start, blocks = work_item(wave, sizes, SHAPE)
        for block in range(blocks):
            stage = step % SHAPE.STAGES
            phase = (step // SHAPE.STAGES & 1) ^ 1
            corner = (batch, head // group_size, block * SHAPE.BLOCK)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), SHAPE.CHUNKS * k.block_type.nbytes)
            load_chunks(k, corner, k_full.index(stage), k_tiles, stage, SHAPE)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), SHAPE.CHUNKS * v.block_type.nbytes)
            load_chunks(v, corner, v_full.index(stage), v_tiles, stage, SHAPE)
            step += 1


@gluon.jit
def online_softmax(s, row_max, scale_log2, SHAPE: gl.constexpr):
    """One online-softmax update: P, its row sums, row maxima, and the factor for earlier results.

    A row is held by four threads, two columns of every eight each. They keep a sum each, because
    adding those up takes shuffles; but some assemblers then spill in the loop of three consumers.
    """
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_max[:, None])
    if SHAPE.CONSUMERS == 3 and SHAPE.IS_CAUSAL:
        sums = gl.sum(p, 1)[:, None]
    else:
        sums = gl.sum(gl.sum(p.reshape([WG_ROWS, SHAPE.BLOCK // 8, 4, 2]), 3), 1)
    return p, sums, new_max, gl.exp2(row_max - new_max)


@gluon.jit
def approximate(x, FUNCTION: gl.constexpr):
    """`lg2` or `rcp` in one instruction, with an error of at most 2.4e-7."""
    code: gl.constexpr = FUNCTION + ".approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def scaled(acc, factor, SHAPE: gl.constexpr):
    """The accumulator with each row multiplied by its factor."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, SHAPE.O_LAYOUT))[:, None]
    total = ()
    for chunk in gl.static_range(SHAPE.CHUNKS):
        total += (acc[chunk] * factor,)
    return total


@gluon.jit
def wait_turn(order, step, WG: gl.constexpr, SHAPE: gl.constexpr):
    """Wait until the previous consumer has issued its products.

    Consumers then compute the softmax one after the other, while the tensor cores serve the others.
    """
    if SHAPE.PINGPONG:
        FIRST: gl.constexpr = 1 if WG == 0 else 0  # the first turn needs no wait
        mbarrier.wait(order.index(WG), (step & 1) ^ FIRST)


@gluon.jit
def end_turn(order, WG: gl.constexpr, SHAPE: gl.constexpr):
    """Let the next consumer issue its products."""
    if SHAPE.PINGPONG:
        NEXT: gl.constexpr = (WG + 1) % SHAPE.CONSUMERS
        mbarrier.arrive(order.index(NEXT), count=1)


@gluon.jit
def key_loop(
    state, tiles, slot, barriers, offs_m, base, first, last, keys, shift, scale_log2,
    WG: gl.constexpr, MASKED: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Key blocks [first, last), software-pipelined: S of this block with P V of the previous one.

    P V may still be in flight when the softmax begins, which needs only S. `base` is the number of
    key blocks before this query tile, which gives the position in the ring.
    """
    _, _, k_full, k_empty, v_full, v_empty, order = barriers
    q_tiles, k_tiles, v_tiles = tiles
    acc, p, row_sum, row_max = state
    SUM_LAYOUT: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SHAPE.O_LAYOUT, 2)
    for block in range(first, last):
        step = base + block
        stage = step % SHAPE.STAGES
        prev_stage = (step - 1) % SHAPE.STAGES
        mbarrier.wait(k_full.index(stage), step // SHAPE.STAGES & 1)
        mbarrier.wait(v_full.index(prev_stage), (step - 1) // SHAPE.STAGES & 1)
        operand = gl.convert_layout(p.to(v_tiles.dtype), P_LAYOUT)
        wait_turn(order, step, WG, SHAPE)
        s = start_scores(q_tiles, slot, k_tiles, stage, SHAPE)
        acc = start_product(operand, v_tiles, prev_stage, acc, SHAPE)
        end_turn(order, WG, SHAPE)
        s = warpgroup_mma_wait(SHAPE.CHUNKS, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            s = gl.where(key_mask(offs_m, block, keys, shift, SHAPE), s, float("-inf"))
        p, sums, row_max, rescale = online_softmax(s, row_max, scale_log2, SHAPE)
        row_sum = row_sum * gl.convert_layout(rescale, SUM_LAYOUT)[:, None] + sums
        # The product reads the previous P from registers until here.
        acc = warpgroup_mma_wait(0, deps=acc + (operand,))[: SHAPE.CHUNKS]
        mbarrier.arrive(v_empty.index(prev_stage), count=1)
        acc = scaled(acc, rescale, SHAPE)
    return acc, p, row_sum, row_max


@gluon.jit
def first_block(
    tiles, slot, barriers, offs_m, base, unmasked, keys, shift, scale_log2,
    WG: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Softmax state after key block 0, which is visible to every query."""
    _, _, k_full, k_empty, _, _, order = barriers
    q_tiles, k_tiles, _ = tiles
    stage = base % SHAPE.STAGES
    mbarrier.wait(k_full.index(stage), base // SHAPE.STAGES & 1)
    wait_turn(order, base, WG, SHAPE)
    s = start_scores(q_tiles, slot, k_tiles, stage, SHAPE)
    end_turn(order, WG, SHAPE)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if SHAPE.HAS_MASK and unmasked == 0:
        s = gl.where(key_mask(offs_m, 0, keys, shift, SHAPE), s, float("-inf"))
    row_max = gl.full([WG_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SHAPE.S_LAYOUT))
    p, row_sum, row_max, _ = online_softmax(s, row_max, scale_log2, SHAPE)
    return zero_chunks(SHAPE), p, row_sum, row_max


@gluon.jit
def pass_over(step, barriers, WG: gl.constexpr, SHAPE: gl.constexpr):
    """Release a key block that none of this consumer's queries sees."""
    _, _, k_full, k_empty, v_full, v_empty, order = barriers
    stage = step % SHAPE.STAGES
    wait_turn(order, step, WG, SHAPE)
    end_turn(order, WG, SHAPE)
    # Wait until it is full: an earlier arrival could count for the previous round of the ring.
    mbarrier.wait(k_full.index(stage), step // SHAPE.STAGES & 1)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), step // SHAPE.STAGES & 1)
    mbarrier.arrive(v_empty.index(stage), count=1)


@gluon.jit
def consumer(tensors, sizes, waves, scale_log2, WG: gl.constexpr, SHAPE: gl.constexpr):
    """One warpgroup: attention of 64 rows of each query tile.

    The output is staged in the shared memory of its Q. With two SLOTS the next Q is loaded by then,
    and the previous slot is released once the next tile is under way.
    """
    q_tiles, k_tiles, v_tiles, barriers, o, lse = tensors
    _, _, _, heads, _, queries, keys = sizes
    tiles = (q_tiles, k_tiles, v_tiles)
    q_full, q_empty, _, _, v_full, v_empty, _ = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SHAPE.O_LAYOUT, 2)
    shift = keys - queries
    base = 0
    item = work_item(0, sizes, SHAPE)
    for wave in range(waves):
        batch, head, start, blocks = item
        if blocks > 0:
            start = start + WG * WG_ROWS
            unmasked, seen = key_blocks(start, queries, keys, WG_ROWS, SHAPE)
            last = base + seen - 1
            offs_m = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, SHAPE.S_LAYOUT))
            slot = WG * SHAPE.SLOTS + wave % SHAPE.SLOTS
            mbarrier.wait(q_full.index(slot), wave // SHAPE.SLOTS & 1)
            state = first_block(
                tiles, slot, barriers, offs_m, base, unmasked, keys, shift, scale_log2, WG, SHAPE
            )
            if SHAPE.SLOTS == 2 and wave > 0:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(WG * SHAPE.SLOTS + (wave + 1) % 2), count=1)
            state = key_loop(
                state, tiles, slot, barriers, offs_m, base, 1, unmasked, keys, shift, scale_log2,
                WG, False, SHAPE,
            )  # fmt: skip
            if SHAPE.HAS_MASK:
                state = key_loop(
                    state, tiles, slot, barriers, offs_m, base, gl.maximum(unmasked, 1), seen, keys,
                    shift, scale_log2, WG, True, SHAPE,
                )  # fmt: skip
            acc, p, row_sum, row_max = state
            stage = last % SHAPE.STAGES
            mbarrier.wait(v_full.index(stage), last // SHAPE.STAGES & 1)
            operand = gl.convert_layout(p.to(v_tiles.dtype), P_LAYOUT)
            acc = start_product(operand, v_tiles, stage, acc, SHAPE)
            item = work_item(wave + 1, sizes, SHAPE)
            acc = warpgroup_mma_wait(0, deps=acc + (operand,))[: SHAPE.CHUNKS]
            mbarrier.arrive(v_empty.index(stage), count=1)
            base += blocks
            if SHAPE.IS_CAUSAL:
                for step in range(last + 1, base):
                    pass_over(step, barriers, WG, SHAPE)
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, SHAPE.S_LAYOUT))
            log_sum = (row_max + approximate(row_sum, "lg2")) * LN2
            row_base = lse + vector_offset(batch, head, heads, queries)
            gl.store(row_base + offs_m, log_sum, mask=offs_m < queries)
            acc = scaled(acc, approximate(row_sum, "rcp"), SHAPE)
            for chunk in gl.static_range(SHAPE.CHUNKS):
                staging = q_tiles.index(slot * SHAPE.CHUNKS + chunk)
                begin_tma_store(acc[chunk], o, staging, batch, head, start, chunk, SHAPE)
            if SHAPE.SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(slot), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group_size", "l2_heads", "waves"])
def flash_fwd_hopper_kernel(
    q, k, v, o, lse, scale_log2, batch_heads, heads, group_size, l2_heads, waves, queries, keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Each program takes one query tile of 64 * CONSUMERS rows per wave."""
    Q_TILES: gl.constexpr = SHAPE.CONSUMERS * SHAPE.SLOTS
    q_shape: gl.constexpr = [Q_TILES * SHAPE.CHUNKS, 1, 1, WG_ROWS, SHAPE.CHUNK]
    kv_shape: gl.constexpr = [SHAPE.STAGES * SHAPE.CHUNKS, 1, 1, SHAPE.BLOCK, SHAPE.CHUNK]
    q_tiles = gl.allocate_shared_memory(q.dtype, q_shape, q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, kv_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, kv_shape, v.layout)
    # Full and empty barriers per slot of Q and stage of K and V, and one for each consumer's turn.
    q_full, q_empty = alloc_barriers(Q_TILES, 1), alloc_barriers(Q_TILES, 1)
    k_full, k_empty = alloc_barriers(SHAPE.STAGES, 1), alloc_barriers(SHAPE.STAGES, SHAPE.CONSUMERS)
    v_full, v_empty = alloc_barriers(SHAPE.STAGES, 1), alloc_barriers(SHAPE.STAGES, SHAPE.CONSUMERS)
    turns = alloc_barriers(SHAPE.CONSUMERS, 1)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    fence_async_shared()
    tensors = (q_tiles, k_tiles, v_tiles, barriers, o, lse)
    sizes = (gl.program_id(0), gl.num_programs(0), batch_heads, heads, l2_heads, queries, keys)
    # Constexprs survive only in tuples written in the call itself.
    if SHAPE.CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (tensors, sizes, waves, scale_log2, 0, SHAPE)),
            (consumer, (tensors, sizes, waves, scale_log2, 1, SHAPE)),
            (kv_producer, (k, v, tensors, sizes, waves, group_size, SHAPE)),
            (q_producer, (q, tensors, sizes, waves, SHAPE)),
        ], [4, 1, 1], [SHAPE.REGISTERS, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, sizes, waves, scale_log2, 0, SHAPE)),
            (consumer, (tensors, sizes, waves, scale_log2, 1, SHAPE)),
            (consumer, (tensors, sizes, waves, scale_log2, 2, SHAPE)),
            (kv_producer, (k, v, tensors, sizes, waves, group_size, SHAPE)),
            (q_producer, (q, tensors, sizes, waves, SHAPE)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
