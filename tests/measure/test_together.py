"""Numbers of all ranks, and the worst of some errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmlab.measure.together import (
    from_all_ranks,
    largest,
    ranks_on_one_device,
    smallest,
    worst,
)
from tests.measure.one_rank import group_of_one


@pytest.mark.parametrize("errors", [[0.0, float("nan")], [float("nan"), 0.0]])
def test_what_is_not_a_number_is_the_worst_error(errors: list[float]) -> None:
    assert worst(errors) == float("inf")


def test_the_worst_of_numbers_is_the_largest() -> None:
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert worst([]) == 0.0


def test_a_group_of_one_hears_itself(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        assert from_all_ranks({"a": 1}) == [{"a": 1}]
        assert (largest(2.0), smallest(2.0)) == (2.0, 2.0)
        assert ranks_on_one_device(torch.device("cpu")) == 1
