"""Flash attention against float64 through the interpreter, which runs fp32 and fp16."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, ones

from lmlab.attention import FlashAttention, FlashAttentionTiled, flash_attention, tiled
from lmlab.attention.flash_op import flash_backward, flash_forward
from tests.attention.reference import Shape, assert_correct, attend, output_and_gradients
from tests.new_tensors import NewTensors

pytestmark = pytest.mark.slow

CAUSAL = partial(flash_attention, is_causal=True)
TILED = partial(tiled.attention, is_causal=True)


@st.composite
def shapes(draw: st.DrawFn, longest: int = 70) -> Shape:
    group, heads = draw(st.sampled_from([1, 2])), draw(st.integers(1, 2))
    keys, head_dim = draw(st.integers(1, longest)), draw(st.integers(1, 70))
    queries, batch = draw(st.integers(1, keys)), draw(st.integers(1, 2))
    return Shape(keys, head_dim, queries, batch, heads * group, group)


@settings(max_examples=8)
@given(shapes(), st.booleans(), st.integers(0, 9))
def test_any_shape(shape: Shape, is_causal: bool, seed: int) -> None:
    assert_correct(flash_attention, shape.inputs(seed=seed), is_causal)


@pytest.mark.parametrize(
    ("shape", "dtype", "is_causal"),
    [
        pytest.param(Shape(keys=1, head_dim=16), torch.float32, True, id="one query, one key"),
        pytest.param(Shape(keys=70, queries=1, head_dim=32), torch.float16, True, id="one query"),
        pytest.param(Shape(keys=64, head_dim=64, heads=2), torch.float16, True, id="whole tiles"),
        pytest.param(Shape(keys=65, head_dim=16), torch.float32, True, id="one row past a tile"),
        pytest.param(Shape(keys=90, queries=37, head_dim=24), torch.float16, True, id="ragged"),
        pytest.param(Shape(keys=20, queries=50, head_dim=16), torch.float32, False, id="few keys"),
        pytest.param(Shape(keys=40, head_dim=256), torch.float32, True, id="head_dim 256"),
        pytest.param(Shape(keys=20, head_dim=3), torch.float16, False, id="head_dim 3"),
        pytest.param(Shape(34, 16, heads=6, group=3), torch.float32, True, id="grouped heads"),
    ],
)
def test_corners(shape: Shape, dtype: torch.dtype, is_causal: bool) -> None:
    assert_correct(flash_attention, shape.inputs(dtype), is_causal)


@pytest.mark.parametrize("scale", [0.7, 1, torch.tensor(1.0)], ids=["float", "int", "tensor"])
def test_scale_and_large_scores(scale: Any) -> None:
    q, k, v, grad_o = Shape(keys=33, head_dim=16).inputs()
    function = partial(flash_attention, scale=scale)
    assert_correct(function, (q, k, v, grad_o), True, scale=float(scale))
    q, k = 6 * q, 6 * k
    assert (q @ k.mT).max() / 4 > 88  # whose exponential exceeds fp32
    assert_correct(CAUSAL, (q, k, v, grad_o), True)


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
    assert_correct(CAUSAL, (q, k, v, torch.ones(()).expand(q.shape)), True)
    assert CAUSAL(*views[:3]).transpose(1, 2).is_contiguous(), "merging heads is a view"


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("function", [FlashAttention, FlashAttentionTiled])
def test_classes_take_three_dimensions_and_save_one_lse(function: Any, is_causal: bool) -> None:
    inputs = tuple(x[:, 0] for x in Shape(keys=40, queries=30, head_dim=16, batch=3).inputs())
    assert_correct(function.apply, inputs, is_causal)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    o = function.apply(q, k, v, is_causal)
    assert torch.equal(o, function.apply(q, k, v)) is not is_causal  # full by default
    *rest, lse = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in rest] == [(3, 30, 16), (3, 40, 16), (3, 40, 16), (3, 30, 16)]
    _, expected = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", [CAUSAL, TILED], ids=["flash", "tiled"])
def test_nothing_quadratic_is_allocated_and_results_are_deterministic(attention: Any) -> None:
    shape = Shape(keys=100, head_dim=16)
    q, k, v, grad_o = shape.inputs()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    elements: list[int] = []
    with NewTensors(lambda x: elements.append(x.untyped_storage().nbytes() // x.itemsize)):
        first = torch.autograd.grad(attention(*inputs), inputs, grad_o)
    assert shape.keys * shape.head_dim <= max(elements) < shape.keys * shape.keys
    assert all(map(torch.equal, first, torch.autograd.grad(attention(*inputs), inputs, grad_o)))


def test_an_empty_batch_gives_an_empty_result() -> None:
    q = torch.randn(0, 2, 8, 16, requires_grad=True)
    o = flash_attention(q, q, q, is_causal=True)
    o.sum().backward()
    assert o.shape == q.grad.shape == (0, 2, 8, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize("loss", [lambda o: o.sin().sum(), Tensor.sum], ids=["of q", "constant"])
def test_a_second_derivative_raises(loss: Callable[[Tensor], Tensor]) -> None:
    """Whether or not dO depends on q."""
    q, k, v, _ = Shape(keys=8, head_dim=16).inputs()
    q.requires_grad_()
    (grad,) = torch.autograd.grad(loss(CAUSAL(q, k, v)), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad.pow(2).sum() + q.sum()).backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: loss(CAUSAL(q, k, v)))(q).sum())(q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"k": ones(1, 2, 9, 8)}, "do not match"), ({"v": ones(1, 2, 8, 16)}, "do not match")),
        *(({"k": ones(2, 9, 16)}, "dimensions"), ({"q": ones(1, 3, 9, 16)}, "do not match")),
        # Three dimensions are a batch, never grouped heads.
        ({"q": ones(4, 9, 16), "k": ones(2, 9, 16), "v": ones(2, 9, 16)}, "do not match"),
        ({"q": ones(1, 2, 0, 16)}, "empty dimension"),
        ({"q": ones(1, 2, 10, 16)}, "10 queries and 9 keys"),
        ({"q": ones(1, 2, 9, 16).half()}, "one dtype and device"),
        ({"q": ones(1, 2, 9, 16, device="meta")}, "device"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"dtype": torch.bfloat16}, "cannot multiply bfloat16"),
        ({"head_dim": 257}, "head_dim is 257"),
        *(({"scale": 0.0}, "scale is 0.0"), ({"scale": float("nan")}, "scale is nan")),
    ],
)
def test_unsupported_inputs_are_one_line_errors(changes: dict[str, Any], message: str) -> None:
    options = {"head_dim": 16, "dtype": torch.float32} | changes
    size, dtype = (1, 2, 9, options.pop("head_dim")), options.pop("dtype")
    inputs = {name: ones(*size, dtype=dtype) for name in "qkv"} | options
    with pytest.raises(ValueError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        flash_attention(**inputs, is_causal=True)


SHAPE = Shape(keys=20, head_dim=16, heads=2, batch=2)


def compiled(function: Any) -> Any:
    """Traced into one graph, without code generation."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("function", "view"),
    [
        pytest.param(CAUSAL, lambda x: x, id="function"),
        pytest.param(CAUSAL, bshd, id="strided inputs"),
        pytest.param(partial(FlashAttention.apply, is_causal=True), lambda x: x[:, 0], id="class"),
    ],
)
def test_compiles_into_one_graph(function: Any, view: Callable[[Tensor], Tensor]) -> None:
    inputs = tuple(map(view, SHAPE.inputs()))
    found = output_and_gradients(compiled(function), *inputs)
    assert all(map(torch.equal, found, output_and_gradients(function, *inputs)))


def test_the_operators_pass_pytorchs_checks() -> None:
    q, k, v, grad_o = SHAPE.inputs()
    o, lse = flash_forward(q, k, v, True, 0.25)
    torch.library.opcheck(flash_backward, (grad_o, q, k, v, o, lse, True, 0.25))
    torch.library.opcheck(flash_forward, (*(x.requires_grad_() for x in (q, k, v)), True, 0.25))


@pytest.mark.parametrize(
    ("attention", "transform"),
    [(CAUSAL, lambda f: f), (CAUSAL, compiled), (TILED, lambda f: f)],
    ids=["eager", "compiled", "tiled"],
)
def test_autocast_casts_inputs_and_gradients_keep_types(attention: Any, transform: Any) -> None:
    q, k, v, grad_o = SHAPE.inputs()
    with torch.autocast("cpu", dtype=torch.float16):
        o, *grads = output_and_gradients(transform(attention), q, k, v, grad_o.half())
        mixed = CAUSAL(q.half(), k, v)
    expected = output_and_gradients(attention, q.half(), k.half(), v.half(), grad_o.half())
    assert o.dtype == torch.float16
    assert torch.equal(o, expected[0])
    assert torch.equal(mixed, CAUSAL(q.half(), k.half(), v.half()))
    for grad, right in zip(grads, expected[1:], strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, right.float())


def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, is_causal=True).sin().sum()


@pytest.mark.parametrize("per_sample", [False, True], ids=["grad", "vmap of grad"])
def test_func_grad(per_sample: bool) -> None:
    q, k, v, _ = SHAPE.inputs()
    gradient = torch.func.grad(total, (0, 1, 2))
    grads = (torch.func.vmap(gradient) if per_sample else gradient)(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert all(map(torch.equal, grads, torch.autograd.grad(total(*inputs), inputs)))


def test_func_vmap() -> None:
    q, k, v, _ = SHAPE.inputs()
    assert torch.equal(torch.func.vmap(CAUSAL)(q, k, v), CAUSAL(q, k, v))
    over_queries = torch.func.vmap(lambda q: CAUSAL(q, k[0], v[0]), in_dims=2, out_dims=1)
    assert torch.equal(over_queries(q.movedim(0, 2))[:, 1], CAUSAL(q[1], k[0], v[0]))
