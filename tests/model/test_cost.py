"""Predicted parameters, FLOPs and traffic are those that torch counts."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lmlab.attention import naive
from lmlab.model import cost
from lmlab.model.cost import attention_parts, flops, parameter_count
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape, ShapeError
from tests.model.model_shapes import SMALL, build, shape_of, shapes


@pytest.mark.parametrize(
    ("hyperparameters", "total"),
    [
        ((768, 3072, 12, 12), 128_625_408),
        ((2560, 10240, 32, 32), 3_406_809_600),
    ],
    ids=["small", "2.7b"],
)
def test_parameters(hyperparameters: tuple[int, int, int, int], total: int) -> None:
    shape = shape_of(4, 128, *hyperparameters, 10_000)
    built = sum(parameter.numel() for parameter in build(shape).parameters())
    assert parameter_count(shape).total == built == total
    assert parameter_count(shape).non_embedding == total - 10_000 * shape.d_model


@settings(max_examples=10)
@given(shape=shapes)
def test_matmul_flops_are_those_that_torch_counts(shape: ModelShape) -> None:
    model = build(shape, device="cpu")
    tokens = torch.randint(shape.vocab_size, (shape.batch, shape.context))
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(tokens), tokens)
        forward = counter.get_total_flops()
        loss.backward()
        backward = counter.get_total_flops() - forward
    predicted = flops(shape, convention="full")
    assert predicted["forward"]["matmul"] == forward
    assert predicted["backward"]["matmul"] == backward


def test_other_flops_of_a_one_token_model_by_hand() -> None:
    one = shape_of(1, 1, 2, 1, 1, 1, 1)
    # Scores 1 x (1 + 5); rope 2 x 2 x 3; norms 3 x (2 x 4 + 3); gate 5; residuals 2 x 2.
    without_loss = 6 + 12 + 33 + 5 + 4
    assert flops(one, mode="forward")["forward"]["other"] == without_loss
    assert [len(flops(one, mode=mode)) for mode in ("forward", "forward_backward")] == [1, 2]
    assert flops(one, mode="train_step")["forward"]["other"] == without_loss + 4 + 4
    # 1 x (1 + 4); 2 x 2 x 3; 3 x (2 x 10 + 4); 11; 2 x 2; 2 x 3; 2; loss 3 + 2.
    assert flops(one)["backward"]["other"] == 5 + 12 + 72 + 11 + 4 + 6 + 2 + 5
    assert flops(one)["optimizer"] == {"matmul": 0, "other": 13 * parameter_count(one).total}


def test_the_causal_convention_halves_attention_only() -> None:
    full, causal = flops(SMALL), flops(SMALL, convention="causal")
    scores = SMALL.num_layers * SMALL.scores
    halved = {"matmul": 2 * scores * SMALL.head_dim, "other": 3 * scores}
    for kind, difference in halved.items():
        assert full["forward"][kind] - causal["forward"][kind] == difference
    assert full["backward"]["other"] - causal["backward"]["other"] == 5 * scores // 2
    assert full["optimizer"] == causal["optimizer"]


@pytest.mark.parametrize(("name", "value"), [("mode", "train"), ("convention", "half")])
def test_unknown_names_are_rejected(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be one of .*, got '{value}'$"):
        flops(SMALL, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_layers", "num_heads"), [(0, 12), (12, 7), (12, 256)])
def test_impossible_shapes_are_rejected(num_layers: int, num_heads: int) -> None:
    with pytest.raises(ShapeError, match=r"^num_(layers|heads)[^\n]*$"):
        shape_of(4, 128, 768, 3072, num_layers, num_heads, 10_000)


ATTENTION = shape_of(3, 8, 24, 32, 2, 4, 17)
SCALE_AND_MASK = ("__mul__", "mul", "ones", "triu_", "masked_fill")
PART_OF = {"softmax": "softmax", **dict.fromkeys(SCALE_AND_MASK, "scale_and_mask")}


class Traffic(TorchFunctionMode):
    """Bytes of the tensors that operators of attention read and write, by part."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"scores": 0, "scale_and_mask": 0, "softmax": 0, "output": 0}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        matmul = "output" if self.bytes["scores"] else "scores"
        part = matmul if name == "matmul" else PART_OF.get(name)
        if part is not None:
            tensors = [t for t in (*args, result) if isinstance(t, Tensor)]
            self.bytes[part] += sum(t.numel() * t.element_size() for t in tensors)
        return result


def test_attention_traffic_is_what_its_operators_read_and_write() -> None:
    size = (ATTENTION.batch, ATTENTION.num_heads, ATTENTION.context, ATTENTION.head_dim)
    q, k, v = (torch.randn(size) for _ in range(3))
    with Traffic() as traffic:
        naive.attention(q, k, v, is_causal=True)
    parts = attention_parts(ATTENTION, element_bytes=4)
    assert {name: part.bytes for name, part in parts.items()} == {
        name: ATTENTION.num_layers * count for name, count in traffic.bytes.items()
    }


def test_attention_flops_are_those_of_the_cost_model() -> None:
    parts = attention_parts(ATTENTION, element_bytes=2)
    matmuls = cost.flops(ATTENTION, mode="forward")["forward"]["matmul"]
    projections = 2 * ATTENTION.tokens * cost.parameter_count(ATTENTION).linear
    assert parts["scores"].flops + parts["output"].flops == matmuls - projections
    others = {operation.name: operation for operation in cost.NON_MATMUL}
    for part, name in (("scale_and_mask", "scale"), ("softmax", "softmax")):
        assert parts[part].flops == others[name].forward * others[name].elements(ATTENTION)
