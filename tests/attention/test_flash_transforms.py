"""Flash attention inside torch.compile, under autocast and under torch.func."""

from functools import partial

import pytest
import torch
from torch import Tensor

from lmlab.attention import FlashAttention, flash_attention
from lmlab.attention.flash_op import flash_backward, flash_forward
from tests.attention.reference import Shape, output_and_gradients

pytestmark = pytest.mark.slow

CAUSAL = partial(flash_attention, is_causal=True)
SHAPE = Shape(keys=20, head_dim=16, heads=2, batch=2)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compiled(function: "partial[Tensor]") -> "partial[Tensor]":
    """Through the compiler's tracing, which stops at any break of the graph, but no code made."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")  # type: ignore[return-value]


def test_compiles_into_one_graph_with_the_same_bits() -> None:
    inputs = SHAPE.inputs()

    through_compiler = output_and_gradients(compiled(CAUSAL), *inputs)

    assert all(map(torch.equal, through_compiler, output_and_gradients(CAUSAL, *inputs)))


def test_the_class_compiles_into_one_graph() -> None:
    inputs = tuple(x[:, 0] for x in SHAPE.inputs())
    function = partial(FlashAttention.apply, is_causal=True)

    through_compiler = output_and_gradients(compiled(function), *inputs)

    assert all(map(torch.equal, through_compiler, output_and_gradients(function, *inputs)))


def test_a_compiled_graph_does_without_the_strides_of_its_inputs() -> None:
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in SHAPE.inputs())

    through_compiler = output_and_gradients(compiled(CAUSAL), *inputs)

    assert all(map(torch.equal, through_compiler, output_and_gradients(CAUSAL, *inputs)))


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_the_operators_keep_pytorchs_rules(operator: str) -> None:
    q, k, v, grad_o = SHAPE.inputs()
    if operator == "forward":
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        torch.library.opcheck(flash_forward, (*inputs, True, 0.25))
    else:
        o, lse = flash_forward(q, k, v, True, 0.25)
        torch.library.opcheck(flash_backward, (grad_o, q, k, v, o, lse, True, 0.25))


def test_shapes_are_known_without_running() -> None:
    q, k, v, _ = (x.to("meta") for x in SHAPE.inputs())

    o, lse = flash_forward(q, k, v, True, 0.25)

    assert (o.shape, o.device.type, lse.shape) == (q.shape, "meta", q.shape[:3])


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=["none", "batch", "batch and heads"])
def test_shapes_of_outputs_and_gradients_are_known_without_memory(leading: tuple[int, ...]) -> None:
    q, k, v = (torch.empty(*leading, 9, 16, device="meta", requires_grad=True) for _ in range(3))

    o = flash_attention(q, k, v, is_causal=True)
    o.sum().backward()

    assert (o.shape, o.device.type) == (q.shape, "meta")
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("through_compiler", [False, True], ids=["eager", "compiled"])
def test_autocast_decides_the_type_and_gradients_keep_theirs(through_compiler: bool) -> None:
    q, k, v, grad_o = SHAPE.inputs()
    function = compiled(CAUSAL) if through_compiler else CAUSAL

    with torch.autocast("cpu", dtype=torch.float16):
        o, *grads = output_and_gradients(function, q, k, v, grad_o.half())

    expected = output_and_gradients(CAUSAL, q.half(), k.half(), v.half(), grad_o.half())
    assert o.dtype == torch.float16
    assert torch.equal(o, expected[0])
    for grad, right in zip(grads, expected[1:], strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, right.float())


def test_autocast_brings_mixed_types_together() -> None:
    q, k, v, _ = SHAPE.inputs()

    with torch.autocast("cpu", dtype=torch.float16):
        o = flash_attention(q.half(), k, v, is_causal=True)

    assert torch.equal(o, flash_attention(q.half(), k.half(), v.half(), is_causal=True))


def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, is_causal=True).sin().sum()


def expected_gradients() -> tuple[Tensor, ...]:
    q, k, v = (x.requires_grad_() for x in SHAPE.inputs()[:3])
    return torch.autograd.grad(total(q, k, v), (q, k, v))


def test_func_grad() -> None:
    grads = torch.func.grad(total, (0, 1, 2))(*SHAPE.inputs()[:3])

    assert all(map(torch.equal, grads, expected_gradients()))


def test_func_vmap() -> None:
    q, k, v, _ = SHAPE.inputs()

    mapped = torch.func.vmap(CAUSAL, in_dims=(0, 0, 0))(q, k, v)

    assert torch.equal(mapped, CAUSAL(q, k, v))


def test_func_vmap_over_queries_alone() -> None:
    q, k, v, _ = SHAPE.inputs()

    mapped = torch.func.vmap(lambda q: CAUSAL(q, k[0], v[0]), in_dims=2, out_dims=1)(
        q.movedim(0, 2)
    )

    assert torch.equal(mapped[:, 1], CAUSAL(q[1], k[0], v[0]))


def test_gradients_one_by_one_for_each_of_a_batch() -> None:
    q, k, v, _ = SHAPE.inputs()

    grads = torch.func.vmap(torch.func.grad(total, (0, 1, 2)))(q, k, v)

    assert all(map(torch.equal, grads, expected_gradients()))


def test_func_refuses_a_second_derivative() -> None:
    q, k, v, _ = Shape(keys=4, head_dim=16).inputs()

    def slope(q: Tensor) -> Tensor:
        return torch.func.grad(total)(q, k, v).sum()

    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        torch.func.grad(slope)(q)
