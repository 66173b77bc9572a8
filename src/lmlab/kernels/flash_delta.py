"""delta = rowsum(O * dO), the per-query term of the softmax gradient.

Both backward passes need it, so a separate, memory-bound launch computes it in one pass over O and
dO. For short sequences that launch costs more than reading O again, and the backward programs
compute delta inline.

The launch also stores the log-sum-exp in base 2, so that the Hopper kernels need not convert it for
every tile.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tile_ops import load_tile, load_vector, tile_of_program, vector_offset


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def compute_delta(
    do_tile, o, o_strides, batch, head, start, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """delta of a tile of queries whose dO is already loaded."""
    o_tile = load_tile(
        o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, BOUNDED, False
    )
    return tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)


@triton.jit
def store_vector(vector, target, batch, head, start, heads, queries, ROWS: tl.constexpr):
    """Store one number per query of a tile."""
    rows = start + tl.arange(0, ROWS)
    row_base = vector_offset(batch, head, heads, queries)
    tl.store(target + row_base + rows, vector, mask=rows < queries)


@triton.jit(do_not_specialize=["batch_heads", "heads"])
def delta_kernel(
    o, do, lse, delta, lse_log2, o_strides, do_strides, batch_heads, heads, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store delta and lse_log2 of all queries: one program per ROWS of one head."""
    tiles = (queries + ROWS - 1) // ROWS
    tile, batch, head = tile_of_program(tl.program_id(0), tiles, batch_heads, heads, 1, False)
    start = tile * ROWS
    do_tile = load_tile(
        do, do_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    rowsum = compute_delta(
        do_tile, o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True
    )
    store_vector(rowsum, delta, batch, head, start, heads, queries, ROWS)
    lse += vector_offset(batch, head, heads, queries)
    lse_vec = load_vector(lse, start, queries, 0.0, ROWS, True)
    store_vector(lse_vec * LOG2E, lse_log2, batch, head, start, heads, queries, ROWS)
