"""Our flash attention is attention: outputs and gradients against float64, for any shape.

Here on a CPU through Triton's interpreter, in fp32 and fp16; its bf16 products are wrong, so bf16
and large shapes are tested on a GPU (`test_flash_gpu`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmlab.attention import FlashAttention, flash_attention
from tests.attention.largest_tensor import LargestTensor
from tests.attention.reference import Shape, assert_right, attend

pytestmark = pytest.mark.slow

CAUSAL = partial(flash_attention, is_causal=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group = draw(st.sampled_from([1, 2]))
    keys = draw(st.integers(1, 70))
    return Shape(
        keys=keys,
        queries=draw(st.integers(1, keys)),
        head_dim=draw(st.integers(1, 70)),
        batch=draw(st.integers(1, 2)),
        heads=group,
        group=group,
    )


@settings(max_examples=8, deadline=None)
@given(shapes(), st.booleans(), st.integers(0, 9))
def test_any_shape(shape: Shape, is_causal: bool, seed: int) -> None:
    inputs = shape.inputs(seed=seed)

    assert_right(partial(flash_attention, is_causal=is_causal), inputs, is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(keys=1, head_dim=16), id="one query, one key"),
        pytest.param(Shape(keys=70, queries=1, head_dim=32), id="one query, many keys"),
        pytest.param(Shape(keys=64, head_dim=64, heads=2), id="whole tiles"),
        pytest.param(Shape(keys=65, head_dim=16, batch=2), id="one row beyond a tile"),
        pytest.param(Shape(keys=90, queries=37, head_dim=24), id="fewer queries than keys"),
        pytest.param(Shape(keys=40, head_dim=256), id="head_dim 256"),
        pytest.param(Shape(keys=40, head_dim=80), id="head_dim padded to 128"),
        pytest.param(Shape(keys=20, head_dim=3), id="head_dim padded to 16"),
        pytest.param(Shape(keys=34, head_dim=16, heads=6, group=3), id="three heads a group"),
    ],
)
def test_corners(shape: Shape, dtype: torch.dtype, is_causal: bool) -> None:
    function = partial(flash_attention, is_causal=is_causal)

    assert_right(function, shape.inputs(dtype), is_causal)


def test_more_queries_than_keys_without_a_mask() -> None:
    shape = Shape(keys=20, queries=50, head_dim=16)

    assert_right(partial(flash_attention, is_causal=False), shape.inputs(), False)


def test_a_scale_of_ones_own() -> None:
    function = partial(flash_attention, is_causal=True, scale=0.7)

    assert_right(function, Shape(keys=33, head_dim=16).inputs(), True, scale=0.7)


@pytest.mark.parametrize("scale", [1, torch.tensor(1.0)], ids=["integer", "tensor"])
def test_a_scale_of_another_kind_of_number(scale: Any) -> None:
    function = partial(flash_attention, is_causal=True, scale=scale)

    assert_right(function, Shape(keys=9, head_dim=16).inputs(), True, scale=1.0)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v, grad_o = Shape(keys=40, head_dim=16).inputs()

    assert (q @ k.mT).max() * 36 / 4 > 88  # whose exponential no fp32 holds
    assert_right(CAUSAL, (q * 6, k * 6, v, grad_o), True)


@pytest.mark.parametrize(
    "leading", [(), (2,), (2, 3), (2, 1, 2)], ids=["none", "batch", "batch, heads", "three"]
)
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(*leading, 20, 16, generator=generator) for _ in range(4))

    assert_right(CAUSAL, inputs, True)  # type: ignore[arg-type]


def heads_last(x: Tensor) -> Tensor:
    """The same numbers, in memory (batch, sequence, heads, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def features_apart(x: Tensor) -> Tensor:
    """The same numbers, with a gap after each."""
    return torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("strided", [heads_last, features_apart])
def test_strided_inputs_and_gradient(strided: "type[Tensor]") -> None:
    inputs = Shape(keys=35, head_dim=16, heads=2, batch=2).inputs()

    views = tuple(strided(x) for x in inputs)

    assert not any(x.is_contiguous() for x in views)
    assert_right(CAUSAL, views, True)  # type: ignore[arg-type]


def test_a_gradient_expanded_from_one_number() -> None:
    q, k, v, _ = Shape(keys=20, head_dim=16).inputs()

    assert_right(CAUSAL, (q, k, v, torch.ones(()).expand(q.shape)), True)


def test_joining_the_heads_of_the_output_copies_nothing() -> None:
    q, k, v, _ = Shape(keys=20, head_dim=16, heads=2, batch=2).inputs()

    o = flash_attention(q, k, v, is_causal=True)

    assert o.transpose(1, 2).is_contiguous()


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = Shape(keys=70, head_dim=32, heads=2).inputs()

    def once() -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        o = flash_attention(q, k, v, is_causal=True)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3])]

    assert all(map(torch.equal, once(), once()))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_class_takes_three_dimensions(is_causal: bool) -> None:
    q, k, v, grad_o = (x[:, 0] for x in Shape(keys=40, queries=30, head_dim=16, batch=2).inputs())

    assert_right(
        lambda q, k, v: FlashAttention.apply(q, k, v, is_causal=is_causal),
        (q, k, v, grad_o),
        is_causal,
    )


def test_the_class_is_not_causal_unless_asked() -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=20, head_dim=16).inputs())

    assert torch.equal(FlashAttention.apply(q, k, v), FlashAttention.apply(q, k, v, False))
    assert not torch.equal(FlashAttention.apply(q, k, v), FlashAttention.apply(q, k, v, True))


def test_saved_are_inputs_output_and_one_natural_log_sum_exp() -> None:
    q, k, v, _ = (x[:, 0].requires_grad_() for x in Shape(keys=40, head_dim=16, batch=3).inputs())

    o = FlashAttention.apply(q, k, v, is_causal=True)

    *rest, lse = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in rest] == [(3, 40, 16)] * 4
    assert lse.shape == (3, 40)
    _, expected = attend(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)


def test_nothing_of_sequence_times_sequence_is_allocated() -> None:
    shape = Shape(keys=200, head_dim=16)
    q, k, v, grad_o = shape.inputs()
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    with LargestTensor() as largest:
        flash_attention(q, k, v, is_causal=True).backward(grad_o)

    assert shape.keys * shape.head_dim <= largest.elements < shape.keys * shape.keys


def test_an_empty_batch_gives_an_empty_result() -> None:
    q = torch.randn(0, 2, 8, 16, requires_grad=True)

    o = flash_attention(q, q, q, is_causal=True)
    o.sum().backward()

    assert o.shape == q.grad.shape == (0, 2, 8, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda o: o.sin().sum(), id="dO depends on q"),
        pytest.param(lambda o: o.sum(), id="dO does not"),
    ],
)
def test_a_second_derivative_is_refused_and_never_left_out(
    loss: Callable[[Tensor], Tensor],
) -> None:
    q, k, v, _ = Shape(keys=8, head_dim=16).inputs()
    q.requires_grad_()
    (grad,) = torch.autograd.grad(loss(CAUSAL(q, k, v)), q, create_graph=True)

    with pytest.raises(RuntimeError, match="once, not twice"):
        (grad.pow(2).sum() + q.sum()).backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"k": torch.randn(1, 2, 9, 8)}, "do not fit", id="another head_dim"),
        pytest.param({"v": torch.randn(1, 2, 8, 16)}, "do not fit", id="fewer values than keys"),
        pytest.param({"k": torch.randn(2, 9, 16)}, "dimensions", id="other dimensions"),
        pytest.param({"q": torch.randn(1, 3, 9, 16)}, "do not fit", id="heads no multiple"),
        pytest.param({"q": torch.randn(1, 2, 0, 16)}, "at least one query", id="no query"),
        pytest.param({"q": torch.randn(1, 2, 10, 16)}, "10 queries and 9 keys", id="too many"),
        pytest.param({"q": torch.randn(1, 2, 9, 16).half()}, "one type and device", id="types"),
        pytest.param({"q": torch.randn(1, 2, 9, 16, device="meta")}, "device", id="devices"),
    ],
)
def test_inputs_that_do_not_fit_are_one_clear_line(change: dict[str, Tensor], message: str) -> None:
    inputs = {name: torch.randn(1, 2, 9, 16) for name in "qkv"} | change

    with pytest.raises(ValueError, match=message) as caught:
        flash_attention(**inputs, is_causal=True)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scale", "message"),
    [
        pytest.param(torch.float64, 16, None, "torch.float64 is not one of", id="float64"),
        pytest.param(torch.int32, 16, None, "torch.int32 is not one of", id="integers"),
        pytest.param(torch.bfloat16, 16, None, "interpreter", id="bfloat16 on a CPU"),
        pytest.param(torch.float32, 257, None, "head_dim is 257", id="head_dim over 256"),
        pytest.param(torch.float32, 16, 0.0, "scale is 0.0", id="no scale"),
        pytest.param(torch.float32, 16, -1.0, "scale is -1.0", id="negative scale"),
        pytest.param(torch.float32, 16, float("nan"), "scale is nan", id="scale not a number"),
    ],
)
def test_what_the_kernels_do_not_take_is_one_clear_line(
    dtype: torch.dtype, head_dim: int, scale: float | None, message: str
) -> None:
    q = torch.ones(1, 4, head_dim, dtype=dtype)

    with pytest.raises(ValueError, match=message) as caught:
        flash_attention(q, q, q, is_causal=False, scale=scale)

    assert "\n" not in str(caught.value)


def test_three_dimensions_are_a_batch_and_never_grouped_heads() -> None:
    q, k = torch.randn(4, 8, 16), torch.randn(2, 8, 16)

    with pytest.raises(ValueError, match="do not fit"):
        flash_attention(q, k, k, is_causal=False)
