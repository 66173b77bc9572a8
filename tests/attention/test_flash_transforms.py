"""Flash attention inside torch.compile, under autocast and under torch.func."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.attention import FlashAttention, flash_attention
from lmlab.attention.flash_op import flash_backward, flash_forward
from tests.attention.reference import Shape, output_and_gradients
from tests.attention.test_flash import bshd

pytestmark = pytest.mark.slow

CAUSAL = partial(flash_attention, is_causal=True)
SHAPE = Shape(keys=20, head_dim=16, heads=2, batch=2)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compiled(function: Any) -> Any:
    """Traced into one graph, without code generation."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("function", "view"),
    [
        pytest.param(CAUSAL, lambda x: x, id="function"),
        pytest.param(CAUSAL, bshd, id="strided inputs"),
        pytest.param(partial(FlashAttention.apply, is_causal=True), lambda x: x[:, 0], id="class"),
    ],
)
def test_compiles_into_one_graph_with_the_same_bits(
    function: Any, view: Callable[[Tensor], Tensor]
) -> None:
    inputs = tuple(map(view, SHAPE.inputs()))

    found = output_and_gradients(compiled(function), *inputs)

    assert all(map(torch.equal, found, output_and_gradients(function, *inputs)))


def test_the_operators_pass_pytorchs_checks() -> None:
    q, k, v, grad_o = SHAPE.inputs()
    o, lse = flash_forward(q, k, v, True, 0.25)
    torch.library.opcheck(flash_backward, (grad_o, q, k, v, o, lse, True, 0.25))
    torch.library.opcheck(flash_forward, (*(x.requires_grad_() for x in (q, k, v)), True, 0.25))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_shapes_are_known_without_memory(leading: tuple[int, ...]) -> None:
    q, k, v = (torch.empty(*leading, 9, 16, device="meta", requires_grad=True) for _ in range(3))

    o = flash_attention(q, k, v, is_causal=True)
    o.sum().backward()

    assert (o.shape, o.device.type) == (q.shape, "meta")
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("transform", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_autocast_casts_inputs_and_gradients_keep_their_type(transform: Any) -> None:
    q, k, v, grad_o = SHAPE.inputs()

    with torch.autocast("cpu", dtype=torch.float16):
        o, *grads = output_and_gradients(transform(CAUSAL), q, k, v, grad_o.half())
        mixed = flash_attention(q.half(), k, v, is_causal=True)

    expected = output_and_gradients(CAUSAL, q.half(), k.half(), v.half(), grad_o.half())
    assert o.dtype == torch.float16
    assert torch.equal(o, expected[0])
    assert torch.equal(mixed, expected[0])
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


def test_func_has_no_second_derivative() -> None:
    q, k, v, _ = Shape(keys=4, head_dim=16).inputs()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(total)(q, k, v).sum())(q)
