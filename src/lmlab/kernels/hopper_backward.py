"""The backward kernels for Hopper with their warps specialised: one loads, two groups compute.

The two walks of `flash_backward` as two launches, each in the manner of `hopper_forward`. A group
keeps 64 rows. For a walked block it starts S and dP together, makes the weights while dP is still
multiplied, and dS while dV is. Products of one block end before the next begins: left in flight
across the turn of the loop, the compiler cannot tell their registers apart and serialises all of
them (it says so, C7512). The other group fills that gap.

On an H200 (bf16, causal, 16 heads, sequence 16384), both launches and D: 3.62 ms at head dimension
64 with blocks of 64, 4.26 with 32; 5.1 ms at 128, the plain kernel without descriptors 7.5. The
seven products run at 750 TFLOP/s there, which leaves fewer products as the only way on:
`hopper_once` and, at head dimension 128, `hopper_wide` have five.

Registers set the sizes. At head dimension 128 the sums dK and dV of 64 rows take 128 of a thread's
240, and blocks of 64 queries just fit; at 64 there is room. Head dimension 256 does not fit.

The log-sum-exp and D come with the queries through the copy engine. Beyond the last query it reads
zeros everywhere: weights of one times gradients of zero, so no mask is needed there.
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
)

from lmlab.kernels.hopper_group import ROWS, write


@gluon.jit
def produce(
    kept, walked, rows, tiles, barriers, where, first, last,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    HAS_ROWS: gl.constexpr, BACKWARDS: gl.constexpr,
):  # fmt: skip
    """Load two kept tiles for each consumer, then pair after pair of walked ones.

    `rows` is one number a walked row, for each of the pair (the log-sum-exp and the delta of
    queries); keys and values have none.
    """
    a_kept, b_kept, a_walked, b_walked, a_rows, b_rows = tiles
    kept_ready, a_ready, b_ready, free = barriers
    batch, head, walked_head, start = where
    SIZE: gl.constexpr = walked[0].block_type.nbytes + (4 * WALKED if HAS_ROWS else 0)
    mbarrier.expect(kept_ready, 2 * CONSUMERS * kept[0].block_type.nbytes)
    for which in gl.static_range(CONSUMERS):
        corner = [batch, head, start + which * ROWS, 0]
        tma.async_copy_global_to_shared(kept[0], corner, kept_ready, a_kept.index(which))
        tma.async_copy_global_to_shared(kept[1], corner, kept_ready, b_kept.index(which))
    for turn in range(0, last - first):
        block = first + turn
        if BACKWARDS:
            block = last - 1 - turn
        slot = turn % STAGES
        # A slot's first use passes at once: an unused barrier counts as one phase ahead.
        mbarrier.wait(free.index(slot), (turn // STAGES & 1) ^ 1)
        corner = [batch, walked_head, block * WALKED, 0]
        a_full, b_full = a_ready.index(slot), b_ready.index(slot)
        mbarrier.expect(a_full, SIZE)
        tma.async_copy_global_to_shared(walked[0], corner, a_full, a_walked.index(slot))
        mbarrier.expect(b_full, SIZE)
        tma.async_copy_global_to_shared(walked[1], corner, b_full, b_walked.index(slot))
        if HAS_ROWS:
            edge = [batch, walked_head, block * WALKED]
            tma.async_copy_global_to_shared(rows[0], edge, a_full, a_rows.index(slot))
            tma.async_copy_global_to_shared(rows[1], edge, b_full, b_rows.index(slot))


@gluon.jit
def two_products(
    tiles, barriers, turn,
    WHICH: gl.constexpr, BLOCK_D: gl.constexpr, WALKED: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start both products of kept with walked tiles: the scores, and the gradient of weights."""
    a_kept, b_kept, a_walked, b_walked, _, _ = tiles
    _, a_ready, b_ready, _ = barriers
    slot = turn % STAGES
    phase = turn // STAGES & 1
    nothing = gl.zeros([ROWS, WALKED], gl.float32, S_LAYOUT)
    kept = a_kept.index(WHICH).reshape([ROWS, BLOCK_D])
    walked = a_walked.index(slot).reshape([WALKED, BLOCK_D]).permute((1, 0))
    mbarrier.wait(a_ready.index(slot), phase)
    scores = warpgroup_mma(kept, walked, nothing, use_acc=False, is_async=True)
    kept = b_kept.index(WHICH).reshape([ROWS, BLOCK_D])
    walked = b_walked.index(slot).reshape([WALKED, BLOCK_D]).permute((1, 0))
    mbarrier.wait(b_ready.index(slot), phase)
    grad_weights = warpgroup_mma(kept, walked, nothing, use_acc=False, is_async=True)
    return scores, grad_weights


@gluon.jit
def make_tiles(
    kept, walked,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory for both kept tiles of each consumer and for slots of both walked ones."""
    kept_shape: gl.constexpr = [CONSUMERS, 1, 1, ROWS, BLOCK_D]
    slot_shape: gl.constexpr = [STAGES, 1, 1, WALKED, BLOCK_D]
    a_kept = gl.allocate_shared_memory(kept[0].dtype, kept_shape, kept[0].layout)
    b_kept = gl.allocate_shared_memory(kept[1].dtype, kept_shape, kept[1].layout)
    a_walked = gl.allocate_shared_memory(walked[0].dtype, slot_shape, walked[0].layout)
    b_walked = gl.allocate_shared_memory(walked[1].dtype, slot_shape, walked[1].layout)
    return a_kept, b_kept, a_walked, b_walked


@gluon.jit
def make_query_tiles(
    kept, walked, rows,
    CONSUMERS: gl.constexpr, WALKED: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of a walk over the queries: their tiles come with a number for each row."""
    a_kept, b_kept, a_walked, b_walked = make_tiles(
        kept, walked, CONSUMERS, WALKED, BLOCK_D, STAGES
    )
    a_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, WALKED], rows[0].layout)
    b_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, WALKED], rows[1].layout)
    return a_kept, b_kept, a_walked, b_walked, a_rows, b_rows


@gluon.jit
def make_passing(
    dtype: gl.constexpr, WALKED: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr
):
    """Shared memory through which dS goes from both groups to those who read it."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    passed = gl.allocate_shared_memory(dtype, [2 * SLOTS, ROWS, WALKED], LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=2)
        mbarrier.init(free.index(slot), count=READERS)
    return passed, ready, free


@gluon.jit
def make_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of the kept tiles and of each slot: filled by the copy engine, then emptied."""
    kept_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    a_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kept_ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(a_ready.index(slot), count=1)
        mbarrier.init(b_ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)
    fence_async_shared()
    return kept_ready, a_ready, b_ready, free


@gluon.jit
def blocks_that_see(
    tile, queries, keys, KEPT: gl.constexpr, WALKED: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """Blocks of queries for a tile of keys: the first, the first that sees all of it, the end."""
    shift = keys - queries
    first = 0
    clear = 0
    last = (queries + WALKED - 1) // WALKED
    if IS_CAUSAL:
        first = gl.maximum(tile * KEPT - shift, 0) // WALKED
        clear = (gl.maximum(tile * KEPT + KEPT - 1 - shift, 0) + WALKED - 1) // WALKED
        clear = gl.minimum(clear, last)
    return first, clear, last


@gluon.jit
def write_keys(
    k_sum, v_sum, targets, batch, head, start, keys, scale,
    BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the gradients of 64 keys and their values."""
    grad_k, grad_v, grad_k_strides, grad_v_strides = targets
    write(v_sum, grad_v, grad_v_strides, batch, head, start, keys, BLOCK_D, HEAD_DIM, LAYOUT)
    k_sum = k_sum * scale
    write(k_sum, grad_k, grad_k_strides, batch, head, start, keys, BLOCK_D, HEAD_DIM, LAYOUT)
