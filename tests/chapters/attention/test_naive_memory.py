"""The formula for naive attention's memory is what autograd saves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lmlab.attention import naive
from lmlab.chapters.attention import naive_memory
from lmlab.chapters.attention.measure.naive import saved_bytes
from lmlab.chapters.attention.measure.problem import Problem, shape_of


def point(causal: bool, precision: str) -> dict[str, Any]:
    sizes = {"batch": 3, "sequence": 24, "head_dim": 8}
    return {**sizes, "precision": precision, "causal": causal}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autograd_saves_the_weights_and_the_mask(
    cpu: torch.device, causal: bool, precision: str
) -> None:
    asked = point(causal, precision)
    problem = Problem(shape_of(asked), cpu, seed=0)
    saved = saved_bytes(partial(naive.attention, is_causal=causal), problem)
    held = {t: n for stage, t, n in naive_memory.account(asked) if stage == "before_backward"}
    assert saved == held["weights"] + held.get("mask", 0)
    assert ("mask" in held) == causal


def test_peaks_have_two_matrices_of_scores_forward_and_four_backward() -> None:
    sums = {s: n for s, tensor, n in naive_memory.account(point(False, "fp32")) if tensor == "sum"}
    matrix, vectors = 3 * 24 * 24 * 4, 3 * 24 * 8 * 4
    assert sums["forward_peak"] == 2 * matrix + 5 * vectors
    assert sums["peak"] == 4 * matrix + 6 * vectors
