"""FlashAttention-2 in plain PyTorch: exact to the last digits of float64, in tiles only."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmlab.attention import FlashAttentionTiled
from lmlab.attention.tiled import attention
from tests.attention.largest_tensor import LargestTensor
from tests.attention.reference import Shape, assert_right, attend, output_and_gradients


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 300), st.sampled_from([1, 3, 16, 40]), st.booleans())
def test_any_shape_to_the_digits_of_float64(
    data: st.DataObject, keys: int, head_dim: int, is_causal: bool
) -> None:
    queries = data.draw(st.integers(1, keys))
    inputs = Shape(keys=keys, queries=queries, head_dim=head_dim, heads=2).inputs(torch.float64)

    ours = output_and_gradients(partial(attention, is_causal=is_causal), *inputs)

    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *inputs)
    for our, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(our, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_narrow_types_are_summed_wide(dtype: torch.dtype) -> None:
    inputs = Shape(keys=300, head_dim=32).inputs(dtype)

    assert_right(partial(attention, is_causal=True), inputs, True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_agree_with_differences(is_causal: bool) -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=19, queries=18, head_dim=3).inputs(torch.float64))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    assert torch.autograd.gradcheck(
        lambda q, k, v: FlashAttentionTiled.apply(q, k, v, is_causal=is_causal),
        inputs,
        fast_mode=True,
    )


def test_the_class_is_not_causal_unless_asked() -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=20, head_dim=4).inputs())

    assert torch.equal(FlashAttentionTiled.apply(q, k, v), attention(q, k, v, is_causal=False))


def test_saved_are_inputs_output_and_one_natural_log_sum_exp() -> None:
    q, k, v, _ = (x[:, 0].requires_grad_() for x in Shape(keys=40, head_dim=16, batch=3).inputs())

    o = FlashAttentionTiled.apply(q, k, v, is_causal=True)

    *rest, lse = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in rest] == [(3, 40, 16)] * 4
    assert lse.shape == (3, 40)
    torch.testing.assert_close(lse, attend(q, k, v, is_causal=True)[1])


@pytest.mark.parametrize("sequence", [40, 600])
def test_nothing_of_sequence_times_sequence_is_allocated(sequence: int) -> None:
    q, k, v, grad_o = (x[:, 0] for x in Shape(keys=sequence, head_dim=8).inputs())
    inputs = [x.requires_grad_() for x in (q, k, v)]

    with LargestTensor() as largest:
        FlashAttentionTiled.apply(*inputs, is_causal=True).backward(grad_o)

    assert 8 * sequence <= largest.elements < sequence * sequence


def test_strided_inputs_and_gradient() -> None:
    inputs = tuple(
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in Shape(keys=35, head_dim=16, heads=2, batch=2).inputs()
    )

    assert_right(partial(attention, is_causal=True), inputs, True)  # type: ignore[arg-type]


def test_autocast_decides_the_type() -> None:
    q, k, v, grad_o = Shape(keys=40, head_dim=16).inputs()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, *grads = output_and_gradients(
            partial(attention, is_causal=True), q, k, v, grad_o.bfloat16()
        )

    assert o.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}


def test_wrong_dimensions_are_one_clear_line() -> None:
    q: Tensor = torch.randn(2, 2, 4, 8)

    with pytest.raises(ValueError, match=r"allowed is \(batch, queries, d\)$"):
        FlashAttentionTiled.apply(q, q, q)


def test_grouped_heads_are_refused_in_one_line() -> None:
    q, k, v, _ = Shape(keys=8, head_dim=4, heads=4, group=2).inputs()

    with pytest.raises(ValueError, match="as many heads of keys as of queries"):
        attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_what_is_no_float_is_refused(dtype: torch.dtype) -> None:
    q = torch.ones(1, 4, 8, dtype=dtype)

    with pytest.raises(ValueError, match=f"{dtype} is not allowed; a float type is"):
        attention(q, q, q, is_causal=True)
