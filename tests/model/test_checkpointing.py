"""Checkpointed, the model computes the same, keeps less, and is as it was afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.model.checkpoint_peak import (
    best_segment,
    predicted_peak_checkpointed,
    predicted_peak_nested,
)
from lmlab.model.checkpointing import (
    Segment,
    Strategy,
    StrategyError,
    checkpointed,
    segments,
    strategy_named,
)
from lmlab.model.loss import cross_entropy
from lmlab.model.peak import predicted_peak
from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM
from tests.model.model_shapes import SMALL

LAYERS = 5
STRATEGIES = ["none", "every-1", "every-2", "every-4", "every-9", "nested"]


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(23, 12, 16, LAYERS, 2, 24)


def gradients(model: TransformerLM, *, autocast: bool) -> list[Tensor]:
    tokens = torch.arange(24).reshape(2, 12) % 23
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_are_those_of_the_plain_model(
    model: TransformerLM, name: str, autocast: bool
) -> None:
    expected = gradients(model, autocast=autocast)
    with checkpointed(model, strategy_named(name)):
        found = gradients(model, autocast=autocast)
    assert len(found) == len(expected) == len(list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_model_is_as_it_was_afterwards(model: TransformerLM) -> None:
    names = list(model.state_dict())
    blocks = list(model.layers)
    with checkpointed(model, strategy_named("nested")):
        assert list(model.parameters())  # the same ones, in the same order
    assert list(model.state_dict()) == names
    assert list(model.layers) == blocks


def test_parameters_keep_their_order(model: TransformerLM) -> None:
    before = [id(p) for p in model.parameters()]
    with checkpointed(model, strategy_named("every-2")):
        assert [id(p) for p in model.parameters()] == before


def count_block_runs(model: TransformerLM, name: str) -> int:
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    hooks = [block.register_forward_pre_hook(count) for block in model.layers]
    with checkpointed(model, strategy_named(name)):
        gradients(model, autocast=False)
    for hook in hooks:
        hook.remove()
    return runs


def test_recomputation_is_one_more_forward_pass_and_nested_one_more_a_level() -> None:
    model = TransformerLM(23, 12, 16, 8, 2, 24)
    assert count_block_runs(model, "none") == 8
    assert count_block_runs(model, "every-4") == 2 * 8
    # Levels of 4, 2 and 1 blocks: each computes its blocks again, but for what is not needed.
    assert 3 * 8 <= count_block_runs(model, "nested") <= 4 * 8


def depth(part: nn.Module) -> int:
    if not isinstance(part, Segment):
        return 0
    return 1 + max(depth(inner) for inner in part.parts)


@pytest.mark.parametrize(("layers", "levels"), [(1, 1), (2, 1), (8, 3), (48, 6)])
def test_nesting_is_as_deep_as_the_logarithm(layers: int, levels: int) -> None:
    parts = segments([nn.Identity() for _ in range(layers)], strategy_named("nested"))
    assert max(depth(part) for part in parts) == levels


def test_a_last_segment_may_be_shorter() -> None:
    parts = segments([nn.Identity() for _ in range(5)], strategy_named("every-2"))
    assert [len(part.parts) for part in parts if isinstance(part, Segment)] == [2, 2, 1]


@pytest.mark.parametrize("name", ["every-0", "every-", "every-x", "sqrt", ""])
def test_an_unknown_strategy_is_named(name: str) -> None:
    with pytest.raises(StrategyError, match="is not known; allowed are none, every-K, nested"):
        strategy_named(name)


def test_a_model_without_blocks_is_refused() -> None:
    with (
        pytest.raises(StrategyError, match="Linear has no list of blocks `layers`"),
        checkpointed(nn.Linear(2, 2), Strategy("nested")),
    ):
        pass


DEEP = replace(SMALL, num_layers=48, context=1024)
# A block that keeps hardly more than its input: no feed-forward to speak of, one short head.
CHEAP_BLOCKS = ModelShape(
    vocab_size=16, context=1024, batch=8, d_model=64, d_ff=1, num_layers=64, num_heads=1
)


def total(shape: ModelShape, segment: int) -> int:
    return predicted_peak_checkpointed(shape, "fp32", segment).parts.total


def test_without_segments_the_peak_is_the_plain_one() -> None:
    assert total(DEEP, 0) == predicted_peak(DEEP, "fp32", "train_step").parts.total


def test_where_a_blocks_activations_outweigh_its_input_the_shortest_segment_is_best() -> None:
    assert best_segment(DEEP, "fp32")[0] == 1
    assert total(DEEP, 1) < total(DEEP, 4) < total(DEEP, 24) < total(DEEP, 0)


def test_the_best_segment_has_the_lowest_peak_of_all() -> None:
    best, moment = best_segment(CHEAP_BLOCKS, "fp32")
    assert moment.parts.total == min(total(CHEAP_BLOCKS, k) for k in range(1, 65))
    assert total(CHEAP_BLOCKS, best) == moment.parts.total


def test_nesting_keeps_an_input_a_level() -> None:
    shape = replace(CHEAP_BLOCKS, d_ff=64)
    nested = predicted_peak_nested(shape, "fp32").parts.total
    assert nested <= total(shape, 1)
    assert predicted_peak_nested(replace(shape, num_layers=1), "fp32").parts.total <= total(
        replace(shape, num_layers=1), 1
    )


def test_no_strategy_goes_below_the_update_of_the_weights() -> None:
    small_batch = replace(SMALL, context=8, batch=1)
    nested = predicted_peak_nested(small_batch, "fp32")
    assert nested.phase == "optimizer"
    assert nested == predicted_peak_checkpointed(small_batch, "fp32", 1)
