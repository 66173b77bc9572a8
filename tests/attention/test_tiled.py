"""FlashAttention-2 in plain PyTorch: exact to the last digits of float64, nothing quadratic."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.attention import FlashAttentionTiled
from lmlab.attention.tiled import attention
from tests.attention.largest_tensor import LargestTensor
from tests.attention.reference import Shape, assert_correct, attend, output_and_gradients

CAUSAL = partial(attention, is_causal=True)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 300), st.sampled_from([1, 3, 16, 40]), st.booleans())
def test_any_shape_to_the_digits_of_float64(
    data: st.DataObject, keys: int, head_dim: int, is_causal: bool
) -> None:
    queries = data.draw(st.integers(1, keys))
    inputs = Shape(keys=keys, queries=queries, head_dim=head_dim, heads=2).inputs(torch.float64)

    found = output_and_gradients(partial(attention, is_causal=is_causal), *inputs)

    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *inputs)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


def test_fp16_accumulates_in_fp32() -> None:
    assert_correct(CAUSAL, Shape(keys=300, head_dim=32).inputs(torch.float16), True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_agree_with_finite_differences(is_causal: bool) -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=19, queries=18, head_dim=3).inputs(torch.float64))
    function = partial(FlashAttentionTiled.apply, is_causal=is_causal)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_the_class_is_not_causal_by_default() -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=20, head_dim=4).inputs())

    assert torch.equal(FlashAttentionTiled.apply(q, k, v), attention(q, k, v, is_causal=False))


@pytest.mark.parametrize("sequence", [40, 600])
def test_nothing_quadratic_is_allocated_and_one_log_sum_exp_is_saved(sequence: int) -> None:
    q, k, v, grad_o = (x[:, 0] for x in Shape(keys=sequence, head_dim=8).inputs())
    inputs = [x.requires_grad_() for x in (q, k, v)]

    with LargestTensor() as largest:
        o = FlashAttentionTiled.apply(*inputs, is_causal=True)
        *rest, lse = o.grad_fn.saved_tensors
        o.backward(grad_o)

    assert 8 * sequence <= largest.elements < sequence * sequence
    assert [x.shape for x in rest] == [q.shape] * 4
    torch.testing.assert_close(lse, attend(q, k, v, is_causal=True)[1])


def test_autocast_casts_inputs_and_gradients_keep_their_type() -> None:
    q, k, v, grad_o = Shape(keys=40, head_dim=16).inputs()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, *grads = output_and_gradients(CAUSAL, q, k, v, grad_o.bfloat16())

    assert o.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}


def test_unsupported_inputs_are_one_line_errors() -> None:
    q, k, v, _ = Shape(keys=8, head_dim=4, heads=4, group=2).inputs()

    with pytest.raises(ValueError, match=r"same number of heads$"):
        attention(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"allowed: \(batch, queries, d\)$"):
        FlashAttentionTiled.apply(q, q, q)
    with pytest.raises(ValueError, match=r"dtype is torch\.int32; allowed"):
        attention(q.int(), q.int(), q.int(), is_causal=True)
