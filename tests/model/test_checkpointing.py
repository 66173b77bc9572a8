"""A checkpointed model computes the same, saves less, and is restored afterwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.model import peak
from lmlab.model.checkpoint_peak import best_segment, predicted_peak
from lmlab.model.checkpointing import StrategyError, checkpointed, parse_strategy
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM
from tests.model.model_shapes import SMALL, shape_of


def gradients(model: TransformerLM, *, autocast: bool = False) -> list[Tensor]:
    tokens = torch.arange(24).reshape(2, 12) % 23
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["none", "every-1", "every-2", "every-9", "nested"])
def test_gradients_are_those_of_the_plain_model(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = TransformerLM(23, 12, 16, 5, 2, 24)
    blocks, parameters = list(model.layers), list(model.parameters())
    expected = gradients(model, autocast=autocast)
    with checkpointed(model, parse_strategy(name)):
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        found = gradients(model, autocast=autocast)
    assert len(found) == len(parameters)
    assert all(map(torch.equal, found, expected))
    assert list(model.layers) == blocks


@pytest.mark.parametrize(
    ("name", "fewest", "most"), [("none", 8, 8), ("every-4", 16, 16), ("nested", 24, 32)]
)
def test_recomputation_is_one_forward_per_level(name: str, fewest: int, most: int) -> None:
    model = TransformerLM(23, 12, 16, 8, 2, 24)
    runs: list[Any] = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    with checkpointed(model, parse_strategy(name)):
        gradients(model)
    # Nested: levels of 4, 2 and 1 blocks, each recomputed except for what is not needed.
    assert fewest <= len(runs) <= most


@pytest.mark.parametrize("name", ["every-0", "every-", "every-x", "sqrt", ""])
def test_unknown_strategies_are_rejected(name: str) -> None:
    with pytest.raises(StrategyError, match=f"^checkpoint must be [^\n]* got '{name}'$"):
        parse_strategy(name)


DEEP = replace(SMALL, num_layers=48, context=1024)
# Blocks that save hardly more than their input.
CHEAP_BLOCKS = shape_of(8, 1024, 64, 1, 64, 1, 16)


def total(shape: ModelShape, segment: int) -> int:
    return predicted_peak(shape, "fp32", "every", segment).parts.total


def test_predicted_peaks_are_ordered() -> None:
    none = predicted_peak(DEEP, "fp32", "none")
    assert none == peak.predicted_peak(DEEP, "fp32", "train_step")
    assert total(DEEP, 1) < total(DEEP, 4) < total(DEEP, 24) < none.parts.total
    assert predicted_peak(DEEP, "fp32", "nested").parts.total <= total(DEEP, 1)


@pytest.mark.parametrize("shape", [DEEP, CHEAP_BLOCKS], ids=["deep", "cheap_blocks"])
def test_the_best_segment_has_the_lowest_peak(shape: ModelShape) -> None:
    best, stage = best_segment(shape, "fp32")
    lengths = range(1, shape.num_layers + 1)
    assert stage.parts.total == total(shape, best) == min(total(shape, k) for k in lengths)
    assert best == 1 or shape is CHEAP_BLOCKS  # with large activations short segments are best


def test_no_strategy_goes_below_the_optimizer_step() -> None:
    few_tokens = replace(SMALL, context=8, batch=1)
    nested = predicted_peak(few_tokens, "fp32", "nested")
    assert nested.phase == "optimizer"
    assert nested == predicted_peak(few_tokens, "fp32", "every", 1)
