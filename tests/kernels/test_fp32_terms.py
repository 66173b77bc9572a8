"""Three bf16 terms add up to the fp32 number, and a product of terms has the six that matter.

On a CPU a launch keeps the whole number in its first term, so the other two are tested here:
decomposition into bf16, and products of hand-made terms in fp16, which the interpreter multiplies.
"""

# Parameters of a kernel are typed by Triton at every call.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lmlab.kernels.fp32_terms import decompose_kernel, dot_terms, load_terms, transpose_terms
from lmlab.kernels.interpreted import interpreted
from lmlab.kernels.views import vector_strides

pytestmark = pytest.mark.slow

SIZE = 16


@triton.jit
def product_kernel(a, b, total, strides, SIZE: tl.constexpr):
    """total + a b^T, of one tile each in three terms."""
    head = tl.program_id(0)
    batch = head.to(tl.int64)
    a_tile = load_terms(a, 1, strides, batch, head, head, SIZE, SIZE, SIZE, SIZE, False, False, 3)
    b_tile = load_terms(b, 1, strides, batch, head, head, SIZE, SIZE, SIZE, SIZE, False, False, 3)
    pointers = total + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(pointers, dot_terms(tl.load(pointers), a_tile, transpose_terms(b_tile, 3), "ieee", 3))


def test_a_product_has_the_terms_above_the_last_bit_and_no_others() -> None:
    for i, j in itertools.product(range(3), range(3)):
        a, b = torch.zeros(2, 3, 1, SIZE, SIZE, dtype=torch.float16)
        a[i] = torch.randint(-4, 5, (SIZE, SIZE))
        b[j] = torch.randint(-4, 5, (SIZE, SIZE))
        total = torch.ones(SIZE, SIZE)

        interpreted(product_kernel)[(1,)](a, b, total, a.stride()[:3], SIZE=SIZE)

        product = a[i, 0].float() @ b[j, 0].float().T
        assert torch.equal(total, 1 + product if i + j < 3 else torch.ones(SIZE, SIZE)), (i, j)


def test_terms_add_up_to_the_number_and_delta_is_computed_as_well() -> None:
    batch, heads, kv_heads, queries, keys, head_dim = 2, 4, 2, 21, 37, 12
    q, grad_o, o = torch.randn(3, batch, heads, queries, head_dim)
    k, v = torch.randn(2, batch, kv_heads, keys, head_dim)
    numbers = q, grad_o, k, v
    terms = [x.new_empty(3 * batch, *x.shape[1:], dtype=torch.bfloat16) for x in numbers]
    rows = batch, heads, queries
    delta = q.new_empty_strided(rows, vector_strides(rows))

    interpreted(decompose_kernel)[(3 * batch * heads, 4)](
        *numbers, o, *terms, delta, *(x.stride()[:3] for x in (*numbers, o, terms[0], terms[2])),
        batch * heads, heads, batch * kv_heads, kv_heads, queries, keys,
        ROWS=16, BLOCK_D=16, HEAD_DIM=head_dim,
    )  # fmt: skip

    for number, stacked in zip(numbers, terms, strict=True):
        x0, x1, x2 = stacked.double().chunk(3)
        torch.testing.assert_close(x0, number.double(), rtol=2**-7, atol=0)
        torch.testing.assert_close(x0 + x1 + x2, number.double(), rtol=2**-24, atol=0)
    torch.testing.assert_close(delta, (o * grad_o).sum(-1))
