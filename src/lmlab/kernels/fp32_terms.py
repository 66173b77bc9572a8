"""fp32 products from bf16 tensor-core products: x = x0 + x1 + x2, three bf16 terms per number.

Tensor cores take fp32 only as TF32, with 11 significant bits. Triton's `tf32x3` recovers fp32
accuracy with three TF32 products, but decomposes operands in registers, in every program and for
every tile, and the backward at head dimension 128 has no registers left. A bf16 has 8 significant
bits, so three of them hold the 24 of fp32, each term being the rounded residual of those before it.
Of the nine products of terms, only six are large enough to change an fp32 result:

    a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0)

Six bf16 products take as long as three TF32 products. The gain is that inputs are decomposed once,
by a separate launch (`decompose_kernel`), and stored in a format that tensor cores read: tiles go
straight to shared memory without passing through registers.

On a CPU, where Triton's interpreter cannot multiply bf16, the terms are fp32: x0 = x, x1 = x2 = 0.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code=assignment

import triton
import triton.language as tl

from lmlab.kernels.flash_delta import compute_delta, store_delta
from lmlab.kernels.tile_ops import load_tile, store_tile, tile_of_program


@triton.jit
def to_terms(x, dtype: tl.constexpr, TERMS: tl.constexpr):
    """Decompose an fp32 tile into terms of a narrower type; a single term is a cast."""
    x0 = x.to(dtype)
    if TERMS == 1:
        terms = (x0,)
    else:
        residual = x - x0.to(tl.float32)
        x1 = residual.to(dtype)
        terms = (x0, x1, (residual - x1.to(tl.float32)).to(dtype))
    return terms


@triton.jit
def load_terms(
    source, batches, strides, batch, head, start, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Load a tile or its three terms, which are stored one after another along the batch axis."""
    x0 = load_tile(
        source, strides, batch, head, start, length, ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR
    )
    if TERMS == 1:
        terms = (x0,)
    else:
        x1 = load_tile(
            source, strides, batch + batches, head, start, length,
            ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR,
        )  # fmt: skip
        x2 = load_tile(
            source, strides, batch + 2 * batches, head, start, length,
            ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR,
        )  # fmt: skip
        terms = (x0, x1, x2)
    return terms


@triton.jit
def transpose_terms(terms, TERMS: tl.constexpr):
    """Transpose each term."""
    if TERMS == 1:
        transposed = (tl.trans(terms[0]),)
    else:
        transposed = (tl.trans(terms[0]), tl.trans(terms[1]), tl.trans(terms[2]))
    return transposed


@triton.jit
def dot_terms(acc, a, b, PRECISION: tl.constexpr, TERMS: tl.constexpr):
    """acc + a b for tiles given as one or three terms, smallest products first.

    Tensor cores truncate when they accumulate, which shows in the fourth digit after thousands of
    tiles. So the products of one tile are summed separately and then added to `acc` in fp32.
    """
    if TERMS == 1:
        acc = tl.dot(a[0], b[0], acc, input_precision=PRECISION)
    else:
        product = tl.dot(a[2], b[0], input_precision=PRECISION)
        product = tl.dot(a[1], b[1], product, input_precision=PRECISION)
        product = tl.dot(a[0], b[2], product, input_precision=PRECISION)
        product = tl.dot(a[1], b[0], product, input_precision=PRECISION)
        product = tl.dot(a[0], b[1], product, input_precision=PRECISION)
        acc += tl.dot(a[0], b[0], product, input_precision=PRECISION)
    return acc


@triton.jit
def decompose_rows(
    source, target, batches, strides, target_strides, tile, batch, head, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store the terms of ROWS rows of one head; return the rows."""
    start = tile * ROWS
    x = load_tile(source, strides, batch, head, start, length, ROWS, BLOCK_D, HEAD_DIM, True, False)
    terms = to_terms(x, target.dtype.element_ty, 3)
    for term in tl.static_range(3):
        store_tile(
            target, target_strides, batch + term * batches, head, start, length,
            terms[term], ROWS, BLOCK_D, HEAD_DIM,
        )  # fmt: skip
    return x


@triton.jit(do_not_specialize=["batch_heads", "heads", "batch_kv_heads", "kv_heads"])
def decompose_kernel(
    q, do, k, v, o, q_terms, do_terms, k_terms, v_terms, delta,
    q_strides, do_strides, k_strides, v_strides, o_strides, q_terms_strides, k_terms_strides,
    batch_heads, heads, batch_kv_heads, kv_heads, queries, keys,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Decompose q, do, k or v, selected by the second program id; with do, also compute delta."""
    program = tl.program_id(0)
    tensor = tl.program_id(1)
    batches = batch_heads // heads
    length = tl.where(tensor < 2, queries, keys)
    tensor_heads = tl.where(tensor < 2, heads, kv_heads)
    tensor_batch_heads = tl.where(tensor < 2, batch_heads, batch_kv_heads)
    tiles = (length + ROWS - 1) // ROWS
    if program < tiles * tensor_batch_heads:
        tile, batch, head = tile_of_program(
            program, tiles, tensor_batch_heads, tensor_heads, 1, False
        )
        if tensor == 0:
            decompose_rows(
                q, q_terms, batches, q_strides, q_terms_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
        elif tensor == 1:
            do_tile = decompose_rows(
                do, do_terms, batches, do_strides, q_terms_strides,
                tile, batch, head, length, ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
            start = tile * ROWS
            rowsum = compute_delta(
                do_tile, o, o_strides, batch, head, start, length, ROWS, BLOCK_D, HEAD_DIM, True,
            )  # fmt: skip
            store_delta(rowsum, delta, batch, head, start, heads, length, ROWS)
        elif tensor == 2:
            decompose_rows(
                k, k_terms, batches, k_strides, k_terms_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
        else:
            decompose_rows(
                v, v_terms, batches, v_strides, k_terms_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
