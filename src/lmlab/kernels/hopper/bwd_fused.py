"""All gradients on Hopper in one pass, head dimension up to 64: five products per tile, not seven.

The dK/dV pass (`bwd_dkdv`) already computes dS, all that dQ needs, but each program does so for one
key tile, and a query's dQ is a sum over all keys that it sees. Here a third warpgroup takes dS from
shared memory, multiplies it by K, and adds the product to an fp32 accumulator in global memory.

The order of these additions is fixed, so the result is bitwise deterministic: program j adds to a
query block only after program j - 1 has, as signaled by a semaphore. The first program stores
instead of adding, and the last scales and writes dQ itself, so the accumulator needs no clearing
before the kernel and no conversion after it.

Waiting costs little because all programs stream queries in one direction, from the end to the
diagonal: program j follows j - 1 through the same blocks, a few iterations behind. That also starts
the longest programs first, and lets all programs of a head read a query block from the L2 at about
the same time. A program waits only for programs launched before it, so some program can always make
progress. With few heads all programs of a head start at once and the last waits for all others;
there `tile_sizes` selects the two-pass kernels under a mask.

Without a mask all loops are equally long. If all programs of a head fit on the GPU at once, they
can start at different blocks instead (ROTATED), evenly spread, and go round: program j first stores
to a segment of its own and then follows program j - 1, or the last if j is 0, through the others,
so that none waits at the start. Because they all wait for each other, every one must get an SM:
heads run one after the other.

The accumulator is private to this kernel, so its layout is the one that makes adding cheapest:
64 x 64 tiles in which the four numbers that a thread holds of every eight columns (two adjacent
columns in each of two rows, eight rows apart) are contiguous. One instruction (red.v4) adds them,
and a warp's instruction covers 512 contiguous bytes.

Tile: BLOCK_N = 128 keys resident, BLOCK_M = 64 queries streamed. Accumulators take most of the
registers: a consumer has 200 per thread, the dQ warpgroup 88. At head dimension 128 no registers
are left for a third warpgroup, and two consumers that also compute dQ are slower than two passes.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmlab.kernels.hopper.bwd_common import (
    begin_key_tile,
    block_backwards,
    dkdv_consumer,
    producer,
)
from lmlab.kernels.hopper.warpgroup import WG_ROWS, alloc_barriers

SIDE = gl.constexpr(64)
"""Rows and columns of a tile."""

warpgroup_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def accum_pointers(dq_accum, index, LAYOUT: gl.constexpr):
    """The address of each element of tile `index`, distributed over a warpgroup by LAYOUT."""
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    row_offset = rows // 16 * 128 + rows % 8 * 16 + rows // 8 % 2 * 2
    col_offset = columns // 8 * (SIDE * 8) + columns % 8 // 2 * 4 + columns % 2
    tile = dq_accum + index.to(gl.int64) * (SIDE * SIDE)
    return (tile + (row_offset[:, None] + col_offset[None, :])).to(gl.int64)


@gluon.jit
def write_v4(pointers, values, INSTRUCTION: gl.constexpr):
    """Store to memory (`st`) or add to it (`red`); the caller must order programs that add to the
    same tile."""
    code: gl.constexpr = (
        INSTRUCTION + ".v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    )
    gl.inline_asm_elementwise(
        code, "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [pointers, values], gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def load_v4(pointers):
    """Load from the L2: other SMs wrote the data, and this SM's L1 may hold stale lines."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,l,l,l", [pointers], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def store_rows(
    tile, target, strides, batch, head, start, length, LAYOUT: gl.constexpr, SHAPE: gl.constexpr
):
    """Store 64 rows of a result, clipped to the tensor."""
    rows = start + gl.arange(0, WG_ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SHAPE.CHUNK, gl.SliceLayout(0, LAYOUT))
    base = target + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = base + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    inside = (rows < length)[:, None] & (columns < SHAPE.HEAD_DIM)[None, :]
    gl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@gluon.jit
def first_offset(tile, tiles, blocks):
    """If ROTATED, by how many blocks before the last one a program starts."""
    return (tiles - 1 - tile) * blocks // tiles


@gluon.jit
def ring_steps(tile, tiles, blocks):
    """If ROTATED, a program's steps in its own segment, and those before the next program's."""
    next_tile = (tile + 1) % tiles
    own_steps = first_offset(tile - 1, tiles, blocks) - first_offset(tile, tiles, blocks)
    last_steps = first_offset(next_tile - 1, tiles, blocks) - first_offset(next_tile, tiles, blocks)
    return own_steps, blocks - last_steps


@gluon.jit
def accumulate_dq(
    dq_part, dq_accum, dq, dq_strides, batch, head, block_index, block, is_first, is_final, queries,
    scale, LAYOUT: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Add this key tile's contribution to one query block of dQ; the last program stores dQ."""
    pointers = accum_pointers(dq_accum, block_index, LAYOUT)
    if is_final:
        if not is_first:
            dq_part = dq_part + load_v4(pointers)
        dq_part = dq_part * scale
        start = block * SHAPE.BLOCK
        store_rows(dq_part, dq, dq_strides, batch, head, start, queries, LAYOUT, SHAPE)
    elif not is_first:
        write_v4(pointers, dq_part, "red.relaxed.gpu.global.add")
    else:
        write_v4(pointers, dq_part, "st.relaxed.gpu.global")


@gluon.jit
def dq_warpgroup(
    tiles, barriers, ds_pipe, dq_accum, semaphores, dq_output, coords, bounds, origin, tile,
    last_tile, scale, SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the contribution of 128 keys to dQ of each query block.

    A program's semaphore counts the blocks that it has added; the next program polls it and resets
    it for the next launch. Polling and signaling both wait for the L2, so a program polls only when
    it has caught up with the last count it read, and signals every second iteration.
    """
    LAYOUT: gl.constexpr = SHAPE.O_LAYOUT
    BLOCK_N: gl.constexpr = SHAPE.CONSUMERS * WG_ROWS
    k_tiles, _, _, _, _, _ = tiles
    ds_tiles, ds_full, ds_empty = ds_pipe
    dq, dq_strides, queries = dq_output
    batch, head, batch_head, _ = coords
    first, _, last, shift = bounds
    own_semaphore = semaphores + batch_head * (last_tile + 1) + tile
    prev_semaphore = own_semaphore - 1
    own_steps = 0
    final_start = 0
    if SHAPE.ROTATED:
        own_steps, final_start = ring_steps(tile, last_tile + 1, last)
        if tile == 0:
            prev_semaphore += last_tile + 1
    # The first query block that sees a key of the next program; earlier ones are final here.
    final_end = 0
    if SHAPE.IS_CAUSAL:
        final_end = gl.maximum((tile + 1) * BLOCK_N - shift, 0) // SHAPE.BLOCK
    if tile == last_tile:
        final_end = last
    zeros = gl.zeros([SHAPE.BLOCK, SHAPE.CHUNK], gl.float32, LAYOUT)
    mbarrier.wait(barriers[0], 0)
    done_before = 0
    for step in range(0, last - first):
        block = block_backwards(origin, step, last, SHAPE)
        ds_stage = step % SHAPE.DS_STAGES
        mbarrier.wait(ds_full.index(ds_stage), step // SHAPE.DS_STAGES & 1)
        ds_top = ds_tiles.index(2 * ds_stage).permute((1, 0))
        k_top = k_tiles.index(0).reshape([WG_ROWS, SHAPE.CHUNK])
        dq_part = warpgroup_mma(ds_top, k_top, zeros, use_acc=False, is_async=True)
        ds_bottom = ds_tiles.index(2 * ds_stage + 1).permute((1, 0))
        k_bottom = k_tiles.index(1).reshape([WG_ROWS, SHAPE.CHUNK])
        dq_part = warpgroup_mma(ds_bottom, k_bottom, dq_part, is_async=True)
        dq_part = warpgroup_mma_wait(0, deps=[dq_part])
        mbarrier.arrive(ds_empty.index(ds_stage), count=1)
        is_first = tile == 0
        is_final = block < final_end
        signals = ((step % 2 == 1) & (block > final_end)) | (block == final_end)
        if SHAPE.ROTATED:
            is_first = step < own_steps
            is_final = step >= final_start
            signals = (step % 2 == 1) | (step == last - 1)
        if not is_first:
            while done_before + own_steps <= step:
                done_before = gl.atomic_add(prev_semaphore, 0, sem="acquire")
        accumulate_dq(
            dq_part, dq_accum, dq, dq_strides, batch, head, batch_head * last + block, block,
            is_first, is_final, queries, scale, LAYOUT, SHAPE,
        )  # fmt: skip
        if signals:
            warpgroup_barrier()  # all threads must have written before one of them signals
            gl.atomic_xchg(own_semaphore, step + 1, sem="release")
    if SHAPE.ROTATED:
        while done_before < last:
            done_before = gl.atomic_add(prev_semaphore, 0, sem="acquire")
    if SHAPE.ROTATED or tile > 0:
        gl.store(prev_semaphore, 0)


@gluon.jit
def alloc_ds_pipe(dtype: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory and barriers through which both consumers pass dS to the dQ warpgroup."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * SHAPE.DS_STAGES, WG_ROWS, SHAPE.BLOCK], LAYOUT)
    return ds_tiles, alloc_barriers(SHAPE.DS_STAGES, 2), alloc_barriers(SHAPE.DS_STAGES, 1)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_fused_kernel(
    q, k, v, do, lse, delta, dk, dv, dq, dq_accum, semaphores, dq_strides,
    scale, batch_heads, heads, l2_heads, queries, keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 128 rows: its dK and dV, and its share of dQ."""
    BLOCK_N: gl.constexpr = SHAPE.CONSUMERS * WG_ROWS
    tile, coords, bounds, tiles, barriers = begin_key_tile(
        (q, k, v, do), (lse, delta), batch_heads, heads, l2_heads, queries, keys, BLOCK_N, SHAPE
    )
    batch, head, _, _ = coords
    first, _, last, _ = bounds
    ds_pipe = alloc_ds_pipe(q.dtype, SHAPE)
    last_tile = (keys + BLOCK_N - 1) // BLOCK_N - 1
    outputs = (dk, dv)
    dq_output = (dq, dq_strides, queries)
    dq_coords = (batch, head, batch * heads + head, 0)
    origin = last - 1
    if SHAPE.ROTATED:
        origin -= first_offset(tile, last_tile + 1, last)
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (dkdv_consumer, (tiles, barriers, ds_pipe, outputs, coords, bounds, scale, 0, SHAPE)),
        (dkdv_consumer, (tiles, barriers, ds_pipe, outputs, coords, bounds, scale, 1, SHAPE)),
        (dq_warpgroup, (tiles, barriers, ds_pipe, dq_accum, semaphores, dq_output, dq_coords,
                        bounds, origin, tile, last_tile, scale, SHAPE)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last,
                    origin, True, True, SHAPE)),
    ], [4, 4, 1], [200, 88, 24])  # fmt: skip
