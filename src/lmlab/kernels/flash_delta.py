"""delta = rowsum(O * dO), the per-query term of the softmax gradient.

Both backward passes need it, so a separate, memory-bound launch computes it in one pass over O and
dO. For short sequences that launch costs more than reading O again, and the backward programs
compute delta inline.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tile_ops import load_tile, tile_of_program, vector_offset


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
def store_delta(rowsum, delta, batch, head, start, heads, queries, ROWS: tl.constexpr):
    """Store delta of a tile of queries."""
    rows = start + tl.arange(0, ROWS)
    row_base = vector_offset(batch, head, heads, queries)
    tl.store(delta + row_base + rows, rowsum, mask=rows < queries)


@triton.jit(do_not_specialize=["batch_heads", "heads"])
def delta_kernel(
    o, do, delta, o_strides, do_strides, batch_heads, heads, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store delta of all queries: one program per ROWS of one head."""
    tiles = (queries + ROWS - 1) // ROWS
    tile, batch, head = tile_of_program(tl.program_id(0), tiles, batch_heads, heads, 1, False)
    start = tile * ROWS
    do_tile = load_tile(
        do, do_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    rowsum = compute_delta(
        do_tile, o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True
    )
    store_delta(rowsum, delta, batch, head, start, heads, queries, ROWS)
