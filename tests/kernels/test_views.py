"""Tensors as kernels see them: copied only when they must be, fp32 numbers as three bf16 terms."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlab.kernels import views
from lmlab.kernels.configs import rows
from lmlab.kernels.fp32_terms import decompose_kernel, dot_terms, load_terms, transpose_terms
from lmlab.kernels.interpreted import interpreted
from lmlab.kernels.plan import rows_per_program
from lmlab.kernels.problem import Problem
from lmlab.kernels.step import Operand
from lmlab.kernels.views import gradient_strides, is_addressable, supports_tma, vector_strides

BSHD = torch.zeros(2, 5, 3, 16).transpose(1, 2)


def with_row_stride(stride: int) -> Tensor:
    return torch.empty_strided((1, 1, 4, 16), (0, 0, stride, 1), device="meta")


@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        pytest.param(BSHD, False, id="bshd"),
        pytest.param(torch.randn(1, 1, 16, 8).mT, True, id="transposed"),
        pytest.param(torch.ones(()).expand(1, 1, 8, 16), True, id="expanded scalar"),
        pytest.param(with_row_stride(2**21), False, id="near"),
        pytest.param(with_row_stride(2**22), True, id="far"),
    ],
)
def test_a_tensor_is_copied_only_if_not_addressable(tensor: Tensor, copied: bool) -> None:
    result = views.addressable(tensor)
    assert (result is not tensor) == copied
    assert is_addressable(result)
    assert result.is_meta or torch.equal(result, tensor)


def test_no_kernel_has_more_rows_than_the_longest_tile() -> None:
    assert all(max(row.tiles.block_m, row.tiles.block_n) <= views.LONGEST_TILE for row in rows())
    for head_dim in (1, 16, 64, 256):
        q = torch.empty(1, 1, 4, head_dim)
        assert rows_per_program(Problem.of(q, q, True, "forward")) <= views.LONGEST_TILE


def operand(tensor: Tensor) -> Operand:
    return Operand(0, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def test_outputs_are_bshd_and_rows_of_vectors_padded_for_tma() -> None:
    out = torch.empty_strided((2, 3, 5, 16), views.bshd_strides((2, 3, 5, 16)))
    assert out.transpose(1, 2).is_contiguous()
    for length in (1, 4, 77, 128):
        vectors = torch.empty_strided((2, 3, length), vector_strides((2, 3, length)))
        assert supports_tma(operand(vectors))
        assert vectors.stride(1) < length + 4


@pytest.mark.parametrize(
    ("tensor", "supported"),
    [
        pytest.param(torch.empty(2, 3, 5, 16), True, id="contiguous"),
        pytest.param(BSHD, True, id="bshd"),
        pytest.param(torch.empty(2, 3, 5, 18, dtype=torch.float16), False, id="rows of 36 bytes"),
        pytest.param(torch.empty(1, 1, 5, 17)[..., :16], False, id="rows of 68 bytes"),
        pytest.param(torch.empty(1, 1, 5, 16).expand(2, 3, 5, 16), False, id="expanded"),
        pytest.param(torch.empty(64).as_strided((1, 1, 4, 16), (3, 5, 16, 1)), True, id="size one"),
    ],
)
def test_what_tma_can_read(tensor: Tensor, supported: bool) -> None:
    assert supports_tma(operand(tensor)) is supported


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(torch.empty(2, 3, 5, 16), id="contiguous"),
        pytest.param(BSHD, id="bshd"),
        pytest.param(torch.empty(2, 5, 3, 4, 16)[:, :, 0].transpose(1, 2), id="one of three"),
        pytest.param(torch.empty(2, 3, 10, 16)[:, :, ::2], id="every second row"),
        pytest.param(torch.empty(2, 1, 5, 16).expand(2, 3, 5, 16), id="expanded head"),
        pytest.param(torch.empty(()).expand(2, 3, 5, 16), id="expanded scalar"),
        pytest.param(torch.empty(999).as_strided((2, 3, 5, 16), (8, 4, 2, 1)), id="overlapping"),
        pytest.param(torch.empty(2, 3, 16, 5).mT, id="transposed"),
        pytest.param(torch.empty(2, 3, 5, 2)[..., :1], id="one feature"),
    ],
)
def test_a_gradient_has_the_layout_that_the_compiler_expects(of: Tensor) -> None:
    with FakeTensorMode() as mode:
        expected = gradient_strides(mode.from_tensor(of))
    real = torch.empty_strided(of.shape, gradient_strides(of))
    assert real.stride() == expected
    assert is_addressable(real)
    assert real.untyped_storage().nbytes() == real.nbytes  # no two elements share memory
    if of.is_contiguous() or of is BSHD:
        assert real.stride() == of.stride()


# On a CPU a launch keeps the whole number in its first term, so the others are tested here.
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


@pytest.mark.slow
def test_a_product_has_the_terms_above_the_last_bit_and_no_others() -> None:
    for i, j in itertools.product(range(3), range(3)):
        a, b = torch.zeros(2, 3, 1, SIZE, SIZE, dtype=torch.float16)
        a[i] = torch.randint(-4, 5, (SIZE, SIZE))
        b[j] = torch.randint(-4, 5, (SIZE, SIZE))
        total = torch.ones(SIZE, SIZE)
        interpreted(product_kernel)[(1,)](a, b, total, a.stride()[:3], SIZE=SIZE)
        product = a[i, 0].float() @ b[j, 0].float().T
        assert torch.equal(total, 1 + product if i + j < 3 else torch.ones(SIZE, SIZE)), (i, j)


@pytest.mark.slow
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
