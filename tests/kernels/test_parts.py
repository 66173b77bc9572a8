"""A number in parts is that number, and a product of parts has the six terms that count.

On a CPU the launches keep a number whole in its first part, so what follows from the other two is
looked at here: cutting in bf16, and products of parts that were chosen by hand. Those are of fp16,
which the interpreter can multiply.
"""

# A kernel's parameters are typed by Triton at every call.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lmlab.kernels.interpreted import interpreted
from lmlab.kernels.parts import add_product, load_parts, split_kernel, turned
from lmlab.kernels.views import row_strides

SIZE = 16
TERMS = list(itertools.product(range(3), range(3)))


@triton.jit
def product_kernel(a, b, total, strides, SIZE: tl.constexpr):
    """total + a b^T, of one tile each in three parts."""
    head = tl.program_id(0)
    batch = head.to(tl.int64)
    a_tile = load_parts(a, 1, strides, batch, head, head, SIZE, SIZE, SIZE, SIZE, False, False, 3)
    b_tile = load_parts(b, 1, strides, batch, head, head, SIZE, SIZE, SIZE, SIZE, False, False, 3)
    places = total + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(places, add_product(tl.load(places), a_tile, turned(b_tile, 3), "ieee", 3))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), TERMS, ids=str)
def test_a_product_has_the_terms_above_the_last_bit_and_no_other(first: int, second: int) -> None:
    a, b = torch.zeros(2, 3, 1, SIZE, SIZE, dtype=torch.float16)
    a[first] = torch.randint(-4, 5, (SIZE, SIZE))
    b[second] = torch.randint(-4, 5, (SIZE, SIZE))
    total = torch.ones(SIZE, SIZE)

    interpreted(product_kernel)[(1,)](a, b, total, row_strides(a), SIZE=SIZE)

    term = a[first, 0].float() @ b[second, 0].float().T
    assert torch.equal(total, 1 + term if first + second < 3 else torch.ones(SIZE, SIZE))


@pytest.mark.slow
def test_the_parts_of_a_number_add_up_to_it_and_delta_is_made_on_the_way() -> None:
    batch, heads, kv_heads, queries, keys, head_dim = 2, 4, 2, 21, 37, 12
    q, grad_o, o = torch.randn(3, batch, heads, queries, head_dim)
    k, v = torch.randn(2, batch, kv_heads, keys, head_dim)
    whole = q, grad_o, k, v
    cut = [x.new_empty(3 * batch, *x.shape[1:], dtype=torch.bfloat16) for x in whole]
    delta = q.new_empty(batch, heads, queries)

    interpreted(split_kernel)[(3 * batch * heads, 4)](
        *whole, o, *cut, delta, *map(row_strides, (*whole, o, cut[0], cut[2])),
        batch * heads, heads, batch * kv_heads, kv_heads, queries, keys,
        ROWS=16, BLOCK_D=16, HEAD_DIM=head_dim,
    )  # fmt: skip

    for number, parts in zip(whole, cut, strict=True):
        first, second, third = parts.double().chunk(3)
        torch.testing.assert_close(first, number.double(), rtol=2**-7, atol=0)
        torch.testing.assert_close(first + second + third, number.double(), rtol=2**-24, atol=0)
    torch.testing.assert_close(delta, (o * grad_o).sum(-1))
