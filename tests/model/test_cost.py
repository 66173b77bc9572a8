"""Predicted parameters and FLOPs are those that torch counts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.utils.flop_counter import FlopCounterMode

from lmlab.model import cost
from lmlab.model.cost import flops, parameter_count
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from tests.model.model_shapes import SMALL, build, shapes, studied_size

SRC = Path(cost.__file__).parents[2]


def test_parameters_of_the_small_model_by_hand() -> None:
    count = parameter_count(SMALL)

    assert count.embedding == count.head == 10_000 * 768 == 7_680_000
    assert count.attention == 12 * 4 * 768 * 768 == 28_311_552
    assert count.feed_forward == 12 * 3 * 768 * 3072 == 84_934_656
    assert count.norms == 25 * 768 == 19_200
    assert count.total == 128_625_408
    assert count.non_embedding == 120_945_408


@pytest.mark.parametrize(
    ("hyper_parameters", "total"),
    [
        pytest.param((768, 3072, 12, 12), 128_625_408, id="small"),
        pytest.param((1024, 4096, 24, 16), 423_183_360, id="medium"),
        pytest.param((1280, 5120, 36, 20), 969_411_840, id="large"),
        pytest.param((1600, 6400, 48, 25), 1_998_235_200, id="xl"),
        pytest.param((2560, 10240, 32, 32), 3_406_809_600, id="2.7b"),
    ],
)
def test_parameters_of_the_studied_sizes_are_those_of_the_model_built(
    hyper_parameters: tuple[int, int, int, int], total: int
) -> None:
    shape = studied_size(*hyper_parameters)

    built = sum(parameter.numel() for parameter in build(shape).parameters())

    assert parameter_count(shape).total == built == total


@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_products_are_those_that_torch_counts(shape: ModelShape) -> None:
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


def test_products_of_the_small_model_by_hand() -> None:
    projections = 2 * 512 * (28_311_552 + 84_934_656 + 7_680_000)
    scores_and_values = 12 * 2 * (2 * 4 * 12 * 128 * 128 * 64)

    assert flops(SMALL)["forward"]["matmul"] == projections + scores_and_values
    assert (
        flops(SMALL, convention="causal")["forward"]["matmul"]
        == projections + scores_and_values // 2
    )


def test_the_rest_of_a_one_token_model_by_hand() -> None:
    one = ModelShape(vocab_size=1, context=1, batch=1, d_model=2, d_ff=1, num_layers=1, num_heads=1)

    # Scores 1 x (1 + 5); rope 2 x 2 x 3; norms 3 x (2 x 4 + 3); gate 5; residuals 2 x 2.
    without_loss = 6 + 12 + 33 + 5 + 4
    assert flops(one, mode="forward")["forward"]["other"] == without_loss
    assert flops(one, mode="train_step")["forward"]["other"] == without_loss + 4 + 4
    # 1 x (1 + 4); 2 x 2 x 3; 3 x (2 x 10 + 4); 11; 2 x 2; 2 x 3; 2; loss 3 + 2.
    backward = 5 + 12 + 72 + 11 + 4 + 6 + 2 + 5
    assert flops(one)["backward"]["other"] == backward


def test_the_causal_convention_changes_attention_only() -> None:
    full, causal = flops(SMALL), flops(SMALL, convention="causal")
    scores = 12 * SMALL.scores

    assert full["forward"]["other"] - causal["forward"]["other"] == 6 * scores // 2
    assert full["backward"]["other"] - causal["backward"]["other"] == 5 * scores // 2
    assert full["optimizer"] == causal["optimizer"]


def test_the_optimizer_multiplies_no_matrices() -> None:
    assert flops(SMALL)["optimizer"] == {"matmul": 0, "other": 13 * 128_625_408}


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("forward", ["forward"]),
        ("forward_backward", ["forward", "backward"]),
        ("train_step", ["forward", "backward", "optimizer"]),
    ],
)
def test_each_mode_has_its_phases(mode: Any, phases: list[str]) -> None:
    assert list(flops(SMALL, mode=mode)) == phases


def test_products_dominate() -> None:
    for phase in ("forward", "backward"):
        assert flops(SMALL)[phase]["other"] < 0.02 * flops(SMALL)[phase]["matmul"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "train"}, "mode: 'train' is not known; allowed are forward, forward_backward"),
        ({"convention": "half"}, "convention: 'half' is not known; allowed are full, causal"),
    ],
    ids=["mode", "convention"],
)
def test_unknown_names_are_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flops(SMALL, **arguments)


def test_an_impossible_shape_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="num_heads: 7 does not divide d_model, which is 768"):
        studied_size(768, 3072, 12, 7)
    with pytest.raises(ValueError, match="num_layers: 0 is not allowed"):
        studied_size(768, 3072, 0, 12)


def test_predicting_costs_needs_no_torch() -> None:
    code = (
        "import sys, lmlab.model.footprint, lmlab.model.loading; sys.exit('torch' in sys.modules)"
    )

    finished = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)})

    assert finished.returncode == 0
