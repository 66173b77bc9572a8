"""Tensors as kernels see them: copied only when they must be."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlab.kernels.configs import rows
from lmlab.kernels.problem import Problem, rows_per_program
from lmlab.kernels.step import Operand
from lmlab.kernels.views import (
    LONGEST_TILE,
    addressable,
    bshd_strides,
    gradient_strides,
    is_addressable,
    supports_tma,
    vector_strides,
)

BSHD = torch.empty(2, 5, 3, 16).transpose(1, 2)


@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        pytest.param(BSHD, False, id="bshd"),
        pytest.param(torch.randn(1, 1, 16, 8).mT, True, id="transposed"),
        pytest.param(torch.ones(()).expand(1, 1, 8, 16), True, id="expanded scalar"),
        pytest.param(
            torch.empty_strided((1, 1, 4, 16), (0, 0, 2**21, 1), device="meta"), False, id="near"
        ),
        pytest.param(
            torch.empty_strided((1, 1, 4, 16), (0, 0, 2**22, 1), device="meta"), True, id="far"
        ),
    ],
)
def test_a_tensor_is_copied_only_if_a_kernel_cannot_address_it(
    tensor: Tensor, copied: bool
) -> None:
    result = addressable(tensor)

    assert (result is not tensor) == copied
    assert is_addressable(result)
    assert result.is_meta or torch.equal(result, tensor)


def test_no_kernel_has_more_rows_than_the_longest_tile() -> None:
    assert all(max(row.tiles.block_m, row.tiles.block_n) <= LONGEST_TILE for row in rows())
    for head_dim in (1, 16, 64, 256):
        q = torch.empty(1, 1, 4, head_dim)
        assert rows_per_program(Problem.of(q, q, True)) <= LONGEST_TILE


def operand(tensor: Tensor) -> Operand:
    return Operand(0, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def test_outputs_are_bshd_in_memory() -> None:
    out = torch.empty_strided((2, 3, 5, 16), bshd_strides((2, 3, 5, 16)))

    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("rows", [1, 4, 77, 128])
def test_rows_of_vectors_are_padded_for_tma(rows: int) -> None:
    vectors = torch.empty_strided((2, 3, rows), vector_strides((2, 3, rows)))

    assert supports_tma(operand(vectors))
    assert vectors.stride(1) < rows + 4


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
