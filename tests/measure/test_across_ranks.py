"""Values of all ranks, and the largest of some errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmlab.measure.across_ranks import (
    gather,
    max_error,
    max_over_ranks,
    min_over_ranks,
    ranks_per_device,
)
from tests.measure.one_rank import group_of_one


@pytest.mark.parametrize(
    ("errors", "largest"),
    [([0.0, float("nan")], float("inf")), ([0.1, 0.3, 0.2], 0.3), ([], 0.0)],
)
def test_nan_is_the_largest_error(errors: list[float], largest: float) -> None:
    assert max_error(errors) == max_error(errors[::-1]) == largest


def test_a_single_rank_gathers_its_own_value(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        assert gather({"a": 1}) == [{"a": 1}]
        assert (max_over_ranks(2.0), min_over_ranks(2.0)) == (2.0, 2.0)
        assert ranks_per_device(torch.device("cpu")) == 1
