"""The peak taken apart is the footprint's own peak, and the graph-keeping forward lies between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from lmlab.model import footprint
from lmlab.model.peak import Moment, Parts, predicted_peak
from lmlab.model.shape import ModelShape
from tests.model.model_shapes import SMALL, shapes
from tests.model.test_footprint import SHAPES

STUDIED = {**SHAPES, "small": SMALL, "small, long": replace(SMALL, context=1024)}


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", STUDIED.values(), ids=STUDIED.keys())
def test_the_parts_add_up_to_the_footprints_peak(
    shape: ModelShape, precision: Any, mode: Any
) -> None:
    expected = footprint.memory(shape, precision, mode, device="cuda").peak
    assert predicted_peak(shape, precision, mode, device="cuda").parts.total == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@given(shape=shapes)
def test_keeping_the_graph_takes_more_than_forgetting_and_less_than_training(
    precision: Any, shape: ModelShape
) -> None:
    def total(mode: Any) -> int:
        return predicted_peak(shape, precision, mode).parts.total

    assert total("forward_graph") <= total("forward_backward") <= total("train_step")


def test_a_forward_pass_holds_no_gradient_and_no_state() -> None:
    moment = predicted_peak(SMALL, "bf16", "forward_graph")
    assert (moment.phase, moment.parts.gradients, moment.parts.optimizer_state) == ("forward", 0, 0)
    assert moment.parts.weight_copies > 0


def test_long_contexts_peak_in_attention_and_short_ones_at_the_loss() -> None:
    short = predicted_peak(SMALL, "bf16", "forward_graph")
    many_heads = replace(SMALL, context=4096, vocab_size=100)
    assert (short.name, predicted_peak(many_heads, "bf16", "forward_graph").name) == (
        "loss",
        "softmax",
    )


def test_a_short_step_peaks_at_the_optimizer() -> None:
    tiny_batch = replace(SMALL, context=8, batch=1)
    moment: Moment = predicted_peak(tiny_batch, "fp32", "train_step")
    assert moment.phase == "optimizer"
    assert moment.parts.gradients == moment.parts.parameters


def test_parts_add_up() -> None:
    assert Parts(parameters=1, workspace=2).plus(workspace=3, other=4).total == 10


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="mode: 'inference' is not known; allowed are forward"):
        predicted_peak(SMALL, "fp32", "inference")  # type: ignore[arg-type]
