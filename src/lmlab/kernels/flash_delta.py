"""What backward needs of the output: the sum over the head dimension of O dO, one number a query.

It is the mean of dP under the weights P, the part of the softmax's gradient that all scores of a
query share. Both walks of the backward need all of it, so it is a launch of its own, one pass over
two tensors at the speed of memory. A short sequence may be over sooner than a launch takes; there
each program can make what it needs by itself.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from lmlab.kernels.tiles import load_tile, place


@triton.jit
def delta_of(
    grad_tile, o, o_strides, batch, head, start, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The sums of some queries, whose gradient of the output is at hand."""
    o_tile = load_tile(
        o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, BOUNDED, False
    )
    return tl.sum(o_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)


@triton.jit
def store_delta(sums, delta, batch, head, start, heads, queries, ROWS: tl.constexpr):
    """Write the sums of some queries."""
    rows = start + tl.arange(0, ROWS)
    tl.store(delta + (batch * heads + head) * queries + rows, sums, mask=rows < queries)


@triton.jit(do_not_specialize=["pairs", "heads"])
def delta_kernel(
    o, grad_o, delta, o_strides, grad_o_strides, pairs, heads, queries,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Sum over the head dimension of output times its gradient, one number a query."""
    tiles = (queries + ROWS - 1) // ROWS
    tile, batch, head = place(tl.program_id(0), tiles, pairs, heads, 1, False)
    start = tile * ROWS
    grad_tile = load_tile(
        grad_o, grad_o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    sums = delta_of(
        grad_tile, o, o_strides, batch, head, start, queries, ROWS, BLOCK_D, HEAD_DIM, True
    )
    store_delta(sums, delta, batch, head, start, heads, queries, ROWS)
