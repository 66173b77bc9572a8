"""Flash attention against float64: outputs and gradients for any shape, through the interpreter.

The interpreter runs fp32 and fp16; bf16 and large shapes are tested on a GPU (`test_flash_gpu`).
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
from tests.attention.reference import Shape, assert_correct, attend

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

    assert_correct(partial(flash_attention, is_causal=is_causal), inputs, is_causal)


@pytest.mark.parametrize(
    ("shape", "dtype", "is_causal"),
    [
        pytest.param(Shape(keys=1, head_dim=16), torch.float32, True, id="one query, one key"),
        pytest.param(Shape(keys=70, queries=1, head_dim=32), torch.float16, True, id="one query"),
        pytest.param(Shape(keys=64, head_dim=64, heads=2), torch.float16, True, id="whole tiles"),
        pytest.param(Shape(keys=64, head_dim=64), torch.float16, False, id="whole tiles, full"),
        pytest.param(Shape(keys=65, head_dim=16), torch.float32, True, id="one row past a tile"),
        pytest.param(Shape(keys=90, queries=37, head_dim=24), torch.float16, True, id="ragged"),
        pytest.param(Shape(keys=20, queries=50, head_dim=16), torch.float32, False, id="few keys"),
        pytest.param(Shape(keys=40, head_dim=256), torch.float32, True, id="head_dim 256"),
        pytest.param(Shape(keys=40, head_dim=80), torch.float32, False, id="head_dim 80"),
        pytest.param(Shape(keys=20, head_dim=3), torch.float16, True, id="head_dim 3"),
        pytest.param(
            Shape(keys=34, head_dim=16, heads=6, group=3), torch.float32, True, id="grouped heads"
        ),
    ],
)
def test_corners(shape: Shape, dtype: torch.dtype, is_causal: bool) -> None:
    function = partial(flash_attention, is_causal=is_causal)

    assert_correct(function, shape.inputs(dtype), is_causal)


@pytest.mark.parametrize("scale", [0.7, 1, torch.tensor(1.0)], ids=["float", "int", "tensor"])
def test_scale(scale: Any) -> None:
    function = partial(flash_attention, is_causal=True, scale=scale)

    assert_correct(function, Shape(keys=33, head_dim=16).inputs(), True, scale=float(scale))


def test_large_scores_do_not_overflow() -> None:
    q, k, v, grad_o = Shape(keys=40, head_dim=16).inputs()

    assert (q @ k.mT).max() * 36 / 4 > 88  # whose exponential exceeds fp32
    assert_correct(CAUSAL, (q * 6, k * 6, v, grad_o), True)


@pytest.mark.parametrize("leading", [(), (2,), (2, 1, 2)], ids=str)
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(*leading, 20, 16, generator=generator) for _ in range(4))

    assert_correct(CAUSAL, inputs, True)  # type: ignore[arg-type]


def bshd(x: Tensor) -> Tensor:
    """The same numbers, in memory (batch, sequence, heads, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided_features(x: Tensor) -> Tensor:
    """The same numbers, with a gap after each."""
    return torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("layout", [bshd, strided_features])
def test_non_contiguous_inputs_and_gradient(layout: Callable[[Tensor], Tensor]) -> None:
    q, k, v, grad_o = Shape(keys=35, head_dim=16, heads=2, batch=2).inputs()

    views = layout(q), layout(k), layout(v), layout(grad_o)

    assert not any(x.is_contiguous() for x in views)
    assert_correct(CAUSAL, views, True)


def test_a_gradient_expanded_from_a_scalar() -> None:
    q, k, v, _ = Shape(keys=20, head_dim=16).inputs()

    assert_correct(CAUSAL, (q, k, v, torch.ones(()).expand(q.shape)), True)


def test_merging_the_heads_of_the_output_is_a_view() -> None:
    q, k, v, _ = Shape(keys=20, head_dim=16, heads=2, batch=2).inputs()

    assert flash_attention(q, k, v, is_causal=True).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_class_takes_three_dimensions_and_saves_one_log_sum_exp(is_causal: bool) -> None:
    inputs = tuple(x[:, 0] for x in Shape(keys=40, queries=30, head_dim=16, batch=3).inputs())
    assert_correct(
        lambda q, k, v: FlashAttention.apply(q, k, v, is_causal=is_causal), inputs, is_causal
    )  # type: ignore[arg-type]

    q, k, v = (x.requires_grad_() for x in inputs[:3])
    *rest, lse = FlashAttention.apply(q, k, v, is_causal).grad_fn.saved_tensors
    assert [tuple(x.shape) for x in rest] == [(3, 30, 16), (3, 40, 16), (3, 40, 16), (3, 30, 16)]
    _, expected = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)


def test_the_class_is_not_causal_by_default() -> None:
    q, k, v, _ = (x[:, 0] for x in Shape(keys=20, head_dim=16).inputs())

    assert torch.equal(FlashAttention.apply(q, k, v), FlashAttention.apply(q, k, v, False))
    assert not torch.equal(FlashAttention.apply(q, k, v), FlashAttention.apply(q, k, v, True))


def test_nothing_quadratic_is_allocated_and_results_are_deterministic() -> None:
    shape = Shape(keys=100, head_dim=16)
    q, k, v, grad_o = shape.inputs()
    inputs = [x.requires_grad_() for x in (q, k, v)]

    with LargestTensor() as largest:
        first = torch.autograd.grad(CAUSAL(*inputs), inputs, grad_o)

    assert shape.keys * shape.head_dim <= largest.elements < shape.keys * shape.keys
    assert all(map(torch.equal, first, torch.autograd.grad(CAUSAL(*inputs), inputs, grad_o)))


def test_an_empty_batch_gives_an_empty_result() -> None:
    q = torch.randn(0, 2, 8, 16, requires_grad=True)

    o = flash_attention(q, q, q, is_causal=True)
    o.sum().backward()

    assert o.shape == q.grad.shape == (0, 2, 8, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda o: o.sin().sum(), id="dO depends on q"),
        pytest.param(lambda o: o.sum(), id="dO is constant"),
    ],
)
def test_a_second_derivative_raises(loss: Callable[[Tensor], Tensor]) -> None:
    q, k, v, _ = Shape(keys=8, head_dim=16).inputs()
    q.requires_grad_()
    (grad,) = torch.autograd.grad(loss(CAUSAL(q, k, v)), q, create_graph=True)

    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad.pow(2).sum() + q.sum()).backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"k": torch.randn(1, 2, 9, 8)}, "do not match", id="head_dim"),
        pytest.param({"v": torch.randn(1, 2, 8, 16)}, "do not match", id="fewer values"),
        pytest.param({"k": torch.randn(2, 9, 16)}, "dimensions", id="rank"),
        pytest.param({"q": torch.randn(1, 3, 9, 16)}, "do not match", id="heads no multiple"),
        pytest.param({"q": torch.randn(1, 2, 0, 16)}, "empty dimension", id="no query"),
        pytest.param({"q": torch.randn(1, 2, 10, 16)}, "10 queries and 9 keys", id="too many"),
        pytest.param({"q": torch.randn(1, 2, 9, 16).half()}, "one dtype and device", id="dtypes"),
        pytest.param({"q": torch.randn(1, 2, 9, 16, device="meta")}, "device", id="devices"),
        pytest.param({"dtype": torch.float64}, "dtype is torch.float64", id="float64"),
        pytest.param({"dtype": torch.bfloat16}, "cannot multiply bfloat16", id="bf16 on a CPU"),
        pytest.param({"head_dim": 257}, "head_dim is 257", id="head_dim 257"),
        pytest.param({"scale": 0.0}, "scale is 0.0", id="zero scale"),
        pytest.param({"scale": float("nan")}, "scale is nan", id="NaN scale"),
        # Three dimensions are a batch, never grouped heads.
        pytest.param(
            {"q": torch.randn(4, 9, 16), "k": torch.randn(2, 9, 16), "v": torch.randn(2, 9, 16)},
            "do not match",
            id="grouped without heads",
        ),
    ],
)
def test_unsupported_inputs_are_one_line_errors(changes: dict[str, Any], message: str) -> None:
    options = {"head_dim": 16, "dtype": torch.float32} | changes
    size, dtype = (1, 2, 9, options.pop("head_dim")), options.pop("dtype")
    inputs = {name: torch.ones(size, dtype=dtype) for name in "qkv"} | options

    with pytest.raises(ValueError, match=message) as caught:
        flash_attention(**inputs, is_causal=True)

    assert "\n" not in str(caught.value)
