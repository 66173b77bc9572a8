"""A number in parts: fp32 products on tensor cores that multiply 16-bit numbers.

Tensor cores take fp32 only as TF32, of which 11 bits count. Three products of TF32 parts make up
for that (`tf32x3` of Triton), but the parts are cut in registers, in every program, at every tile,
and backward at a head dimension of 128 has no registers left. A bf16 has 8 bits that count, so
three of them hold all 24 of an fp32 number: x = x0 + x1 + x2, each the rounded rest of what the
ones before leave. Of the nine products of parts six are larger than the last bit of an fp32 number:

    a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0)

Six bf16 products run as fast as three of TF32. What is gained is that inputs are cut once, by a
launch before (`split_kernel`), and lie in memory as tensor cores want them: whole tiles go from
there to shared memory and never through registers.

On a CPU, where the interpreter cannot multiply bf16, parts are fp32 and the first is all of it.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code=assignment

import triton
import triton.language as tl

from lmlab.kernels.flash_delta import delta_of, store_delta
from lmlab.kernels.tiles import load_tile, place, store_tile


@triton.jit
def in_parts(number, kind: tl.constexpr, PARTS: tl.constexpr):
    """A tile of fp32 numbers as parts of a shorter type; with one part, rounded to it."""
    first = number.to(kind)
    if PARTS == 1:
        parts = (first,)
    else:
        rest = number - first.to(tl.float32)
        second = rest.to(kind)
        parts = (first, second, (rest - second.to(tl.float32)).to(kind))
    return parts


@triton.jit
def load_parts(
    source, batches, strides, batch, head, start, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile, or its parts: all batches of one part come before those of the next."""
    first = load_tile(
        source, strides, batch, head, start, length, ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR
    )
    if PARTS == 1:
        parts = (first,)
    else:
        second = load_tile(
            source, strides, batch + batches, head, start, length,
            ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR,
        )  # fmt: skip
        third = load_tile(
            source, strides, batch + 2 * batches, head, start, length,
            ROWS, BLOCK_D, HEAD_DIM, BOUNDED, DESCRIPTOR,
        )  # fmt: skip
        parts = (first, second, third)
    return parts


@triton.jit
def turned(parts, PARTS: tl.constexpr):
    """Each part transposed."""
    if PARTS == 1:
        across = (tl.trans(parts[0]),)
    else:
        across = (tl.trans(parts[0]), tl.trans(parts[1]), tl.trans(parts[2]))
    return across


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """total + a b, of tiles or of tiles in parts; small terms first.

    Tensor cores cut off what they add to a sum instead of rounding it. Over thousands of tiles that
    shows in the fourth digit, so the products of parts are summed apart and added as fp32 numbers.
    """
    if PARTS == 1:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    else:
        own = tl.dot(a[2], b[0], input_precision=PRECISION)
        own = tl.dot(a[1], b[1], own, input_precision=PRECISION)
        own = tl.dot(a[0], b[2], own, input_precision=PRECISION)
        own = tl.dot(a[1], b[0], own, input_precision=PRECISION)
        own = tl.dot(a[0], b[1], own, input_precision=PRECISION)
        total += tl.dot(a[0], b[0], own, input_precision=PRECISION)
    return total


@triton.jit
def split_rows(
    source, target, batches, strides, target_strides, tile, batch, head, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Cut some rows of one head into parts; returns them whole."""
    start = tile * ROWS
    number = load_tile(
        source, strides, batch, head, start, length, ROWS, BLOCK_D, HEAD_DIM, True, False
    )
    parts = in_parts(number, target.dtype.element_ty, 3)
    for part in tl.static_range(3):
        store_tile(
            target, target_strides, batch + part * batches, head, start, length,
            parts[part], ROWS, BLOCK_D, HEAD_DIM,
        )  # fmt: skip
    return number


@triton.jit(do_not_specialize=["pairs", "heads", "kv_pairs", "kv_heads"])
def split_kernel(
    q, grad_o, k, v, o, q_parts, grad_o_parts, k_parts, v_parts, delta,
    q_strides, grad_o_strides, k_strides, v_strides, o_strides, query_strides, key_strides,
    pairs, heads, kv_pairs, kv_heads, queries, keys,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Cut queries, gradients, keys and values; the second number of a program says which.

    With the gradients at hand their delta is made on the way.
    """
    program = tl.program_id(0)
    which = tl.program_id(1)
    batches = pairs // heads
    length = tl.where(which < 2, queries, keys)
    its_heads = tl.where(which < 2, heads, kv_heads)
    its_pairs = tl.where(which < 2, pairs, kv_pairs)
    tiles = (length + ROWS - 1) // ROWS
    if program < tiles * its_pairs:
        tile, batch, head = place(program, tiles, its_pairs, its_heads, 1, False)
        if which == 0:
            split_rows(
                q, q_parts, batches, q_strides, query_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
        elif which == 1:
            grad_tile = split_rows(
                grad_o, grad_o_parts, batches, grad_o_strides, query_strides,
                tile, batch, head, length, ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
            start = tile * ROWS
            sums = delta_of(
                grad_tile, o, o_strides, batch, head, start, length,
                ROWS, BLOCK_D, HEAD_DIM, True,
            )  # fmt: skip
            store_delta(sums, delta, batch, head, start, heads, length, ROWS)
        elif which == 2:
            split_rows(
                k, k_parts, batches, k_strides, key_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
        else:
            split_rows(
                v, v_parts, batches, v_strides, key_strides, tile, batch, head, length,
                ROWS, BLOCK_D, HEAD_DIM,
            )  # fmt: skip
