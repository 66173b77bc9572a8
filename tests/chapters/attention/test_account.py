"""The account of naive attention's memory is what autograd really keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lmlab.attention import naive
from lmlab.chapters.attention.measure import account
from lmlab.chapters.attention.measure.problem import Problem, Shape
from tests.chapters.attention.allocated import Allocated


def shape(is_causal: bool, precision: str = "fp32", heads: int | None = None) -> Shape:
    return Shape(
        batch=3, heads=heads, sequence=24, head_dim=8, precision=precision, is_causal=is_causal
    )


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autograd_keeps_the_weights_and_the_mask_and_nothing_else(
    cpu: torch.device, is_causal: bool, precision: str
) -> None:
    asked = shape(is_causal, precision)
    problem = Problem(asked, cpu, seed=0)
    kept = account.saved_bytes(partial(naive.attention, is_causal=is_causal), problem)
    rows = {row["tensor"]: row["bytes"] for row in account.before_backward(asked)}
    assert kept == rows["weights"] + rows.get("mask", 0)
    assert ("mask" in rows) == is_causal


def test_rows_name_shapes_and_bytes() -> None:
    rows = account.before_backward(shape(True, "bf16", heads=2))
    assert {"tensor": "weights", "shape": [3, 2, 24, 24], "bytes": 3 * 2 * 24 * 24 * 2} in rows
    assert {"tensor": "mask", "shape": [24, 24], "bytes": 24 * 24} in rows
    assert account.total_bytes(rows) == sum(row["bytes"] for row in rows)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_forward_holds_two_tensors_of_scores_at_most(cpu: torch.device, is_causal: bool) -> None:
    asked = shape(is_causal)
    problem = Problem(asked, cpu, seed=0)
    given = *problem.inputs, problem.grad_o
    with Allocated(given) as allocated:
        naive.attention(*problem.inputs, is_causal=is_causal)
    there = sum(tensor.nbytes for tensor in given)
    assert there + allocated.peak_bytes == account.total_bytes(account.in_forward(asked))


def test_at_the_peak_four_tensors_of_scores_are_there() -> None:
    rows = account.at_peak(shape(False))
    assert [row["tensor"] for row in rows if row["shape"] == [3, 24, 24]] == [
        "weights",
        "gradient of weights",
        "weights × their gradient",
        "gradient of scores",
    ]
