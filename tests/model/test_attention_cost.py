"""FLOPs and bytes of attention's parts against what its operators really touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lmlab.attention import naive
from lmlab.model import cost
from lmlab.model.attention_cost import attention_parts
from lmlab.model.shape import ModelShape

SHAPE = ModelShape(
    vocab_size=17, context=8, batch=3, d_model=24, d_ff=32, num_layers=2, num_heads=4
)
PARTS = attention_parts(SHAPE, element_bytes=4)
PART_OF = {
    "matmul": ("scores", "output"),
    "mul": ("scale_and_mask",),
    "ones": ("scale_and_mask",),
    "triu_": ("scale_and_mask",),
    "masked_fill": ("scale_and_mask",),
    "softmax": ("softmax",),
}


class Traffic(TorchFunctionMode):
    """Bytes of tensors that each operator takes and gives, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in PART_OF or name == "__mul__":
            touched = [*args, result]
            size = sum(t.numel() * t.element_size() for t in touched if isinstance(t, Tensor))
            self.calls.append((name.strip("_") if name == "__mul__" else name, size))
        return result


def test_softmax_is_five_operations_a_score_over_batch_heads_and_both_lengths() -> None:
    assert PARTS["softmax"].flops == 5 * SHAPE.num_layers * 3 * 4 * 8 * 8


def test_the_products_are_those_of_the_cost_model() -> None:
    everything = cost.flops(SHAPE, mode="forward")["forward"]["matmul"]
    projections = 2 * SHAPE.tokens * cost.parameter_count(SHAPE).linear
    assert PARTS["scores"].flops + PARTS["output"].flops == everything - projections


def test_the_rest_is_that_of_the_cost_model() -> None:
    rest = {operation.name: operation for operation in cost.REST}
    for part, name in (("scale_and_mask", "scale"), ("softmax", "softmax")):
        operation = rest[name]
        assert PARTS[part].flops == operation.forward * operation.elements(SHAPE)


def test_bytes_are_what_the_operators_take_and_give() -> None:
    size = (SHAPE.batch, SHAPE.num_heads, SHAPE.context, SHAPE.head_dim)
    q, k, v = (torch.randn(size) for _ in range(3))
    with Traffic() as traffic:
        naive.attention(q, k, v, is_causal=True)
    found = dict.fromkeys(PARTS, 0)
    products = iter(PART_OF["matmul"])
    for name, count in traffic.calls:
        part = next(products) if name == "matmul" else PART_OF[name][0]
        found[part] += count
    assert {part: SHAPE.num_layers * count for part, count in found.items()} == {
        part: cost.bytes for part, cost in PARTS.items()
    }


def test_half_the_element_is_half_the_traffic_of_the_tensors() -> None:
    half = attention_parts(SHAPE, element_bytes=2)
    for part in ("scores", "softmax", "output"):
        assert half[part].bytes * 2 == PARTS[part].bytes
        assert half[part].flops == PARTS[part].flops
