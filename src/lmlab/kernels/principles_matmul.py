"""A tiled matmul, with and without a tile order that improves reuse in the L2.

Computing one tile of BLOCK_M x BLOCK_N results reads BLOCK_M rows of A and BLOCK_N columns of B, so
each number loaded is used in BLOCK_N or BLOCK_M multiplications: doubling both sides of the tile
halves the traffic. Programs that run at the same time share inputs through the L2. In row-major
order a wave of programs needs a few rows of A but all of B; in groups of GROUP rows of tiles, taken
column by column, it needs a few of both.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmlab.kernels.interpreted import kernel_for


@triton.jit
def ordered_tile(program, tile_rows, tile_columns, GROUP: tl.constexpr):
    """Row and column of a program's tile; GROUP 0 is row-major, as is 1."""
    if GROUP == 0:
        return program // tile_columns, program % tile_columns
    first = program // (GROUP * tile_columns) * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    within = program % (GROUP * tile_columns)
    return first + within % height, within // height


@triton.jit
def product_tile(
    a, b, rows, columns, depth, a_row, a_depth, b_depth, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One tile of A B, accumulated in fp32; `rows` and `columns` must be in bounds."""
    ks = tl.arange(0, BLOCK_K)
    a_tiles = a + rows[:, None].to(tl.int64) * a_row + ks[None, :] * a_depth
    b_tiles = b + ks[:, None] * b_depth + columns[None, :].to(tl.int64) * b_column
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a_tile = tl.load(a_tiles)
            b_tile = tl.load(b_tiles)
        else:
            a_tile = tl.load(a_tiles, mask=ks[None, :] < depth - start, other=0.0)
            b_tile = tl.load(b_tiles, mask=ks[:, None] < depth - start, other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a_tiles += BLOCK_K * a_depth
        b_tiles += BLOCK_K * b_depth
    return total


@triton.jit
def matmul_kernel(
    a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """C = A B for row-major matrices whose sides are multiples of the tile's."""
    row, column = ordered_tile(tl.program_id(0), m // BLOCK_M, n // BLOCK_N, GROUP)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    total = product_tile(a, b, rows, columns, k, k, 1, n, 1, BLOCK_M, BLOCK_N, BLOCK_K, True)
    places = c + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(places, total.to(c.dtype.element_ty))


def matmul(
    a: Tensor, b: Tensor, *, block_m: int, block_n: int, block_k: int = 32, group: int = 0,
    warps: int = 4, stages: int = 3, out: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The product, and the compiled kernel with its register and shared-memory use."""
    (m, k), (_, n) = a.shape, b.shape
    if m % block_m or n % block_n or k % block_k:
        raise ValueError(
            f"matmul: {m} x {k} x {n} must be multiples of {block_m} x {block_k} x {block_n}"
        )
    result = torch.empty(m, n, device=a.device, dtype=a.dtype) if out is None else out
    grid = ((m // block_m) * (n // block_n),)
    compiled = kernel_for(matmul_kernel, a.device)[grid](
        a, b, result, m, n, k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return result, compiled
