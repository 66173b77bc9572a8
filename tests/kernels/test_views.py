"""Tensors as kernels see them: copied only when they must be."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlab.kernels.configs import rows
from lmlab.kernels.problem import Problem, delta_rows
from lmlab.kernels.views import (
    LONGEST_TILE,
    addressable,
    descriptor,
    empty_by_heads,
    empty_gradient,
    has_descriptor,
    is_addressable,
)


def test_a_dense_last_dimension_is_enough() -> None:
    heads_last = torch.randn(2, 5, 3, 16).transpose(1, 2)

    assert addressable(heads_last) is heads_last


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(1, 1, 16, 8).mT, id="transposed"),
        pytest.param(torch.ones(()).expand(1, 1, 8, 16), id="expanded from one number"),
    ],
)
def test_what_cannot_be_walked_is_copied(tensor: torch.Tensor) -> None:
    copy = addressable(tensor)

    assert copy.is_contiguous()
    assert torch.equal(copy, tensor)


def test_rows_too_far_apart_for_32_bits_inside_a_tile_are_copied() -> None:
    far = torch.empty_strided((1, 1, 4, 16), (0, 0, 2**22, 1), device="meta")
    near = torch.empty_strided((1, 1, 4, 16), (0, 0, 2**21, 1), device="meta")

    assert addressable(far).is_contiguous()
    assert addressable(near) is near


@pytest.mark.parametrize("head_dim", [1, 16, 64, 256])
def test_no_pass_over_rows_takes_more_than_the_longest_tile(head_dim: int) -> None:
    q = torch.empty(1, 1, 4, head_dim)

    assert delta_rows(Problem.of(q, q, True)) <= LONGEST_TILE


def test_no_line_of_the_table_has_more_than_the_longest_tile() -> None:
    assert all(max(row.tiles.kept, row.tiles.walked) <= LONGEST_TILE for row in rows())


def test_outputs_lie_with_the_heads_of_a_token_together() -> None:
    out = empty_by_heads(torch.empty(2, 3, 5, 16))

    assert out.shape == (2, 3, 5, 16)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        pytest.param(torch.empty(2, 3, 5, 16), True, id="contiguous"),
        pytest.param(torch.empty(2, 5, 3, 16).transpose(1, 2), True, id="heads last"),
        pytest.param(torch.empty(2, 3, 5, 18, dtype=torch.float16), False, id="rows of 36 bytes"),
        pytest.param(torch.empty(1, 1, 5, 17)[..., :16], False, id="rows of 68 bytes"),
        pytest.param(torch.empty(1, 1, 5, 16).expand(2, 3, 5, 16), False, id="the same twice"),
        pytest.param(torch.empty(81)[1:].view(1, 1, 5, 16), False, id="address off by 4"),
    ],
)
def test_what_the_copy_engine_can_read(tensor: torch.Tensor, fits: bool) -> None:
    assert has_descriptor(tensor) is fits


def test_a_dimension_of_one_may_have_any_stride() -> None:
    odd = torch.empty(64).as_strided((1, 1, 4, 16), (3, 5, 16, 1))

    assert has_descriptor(odd)
    assert descriptor(odd, 8, 16).block_shape == [1, 1, 8, 16]


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(torch.empty(2, 3, 5, 16), id="contiguous"),
        pytest.param(torch.empty(2, 5, 3, 16).transpose(1, 2), id="heads side by side"),
    ],
)
def test_a_gradient_lies_as_its_tensor_does(of: torch.Tensor) -> None:
    assert empty_gradient(of).stride() == of.stride()


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(torch.empty(2, 5, 3, 4, 16)[:, :, 0].transpose(1, 2), id="one of three"),
        pytest.param(torch.empty(2, 3, 10, 16)[:, :, ::2], id="every second row"),
        pytest.param(torch.empty(2, 1, 5, 16).expand(2, 3, 5, 16), id="one head for all"),
        pytest.param(torch.empty(()).expand(2, 3, 5, 16), id="one number for all"),
        pytest.param(torch.empty(999).as_strided((2, 3, 5, 16), (8, 4, 2, 1)), id="overlapping"),
        pytest.param(torch.empty(2, 3, 16, 5).mT, id="features apart"),
        pytest.param(torch.empty(2, 3, 5, 2)[..., :1], id="one feature"),
    ],
)
def test_the_compiler_expects_a_gradient_as_it_lies(of: torch.Tensor) -> None:
    with FakeTensorMode() as mode:
        expected = empty_gradient(mode.from_tensor(of))

    real = empty_gradient(of)

    assert real.stride() == expected.stride()
    assert is_addressable(real)
    assert real.untyped_storage().nbytes() == real.nbytes  # no two numbers share a place


def test_a_gradient_of_what_no_kernel_can_walk_is_contiguous() -> None:
    assert empty_gradient(torch.empty(2, 3, 16, 5).mT).is_contiguous()
