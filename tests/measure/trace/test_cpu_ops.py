"""CPU operators: self times, and those that work separated from bookkeeping."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lmlab.measure.trace.cpu_ops import callers, does_work, self_times
from lmlab.measure.trace.frames import names

# aten::linear calls aten::t and aten::matmul, which calls aten::mm; then aten::add by itself.
OPERATORS = [f"aten::{name}" for name in ["linear", "t", "matmul", "mm", "resolve_conj", "add"]]
START = np.array([0, 2, 10, 12, 13, 100])
DURATION = np.array([90, 5, 70, 60, 1, 20])
PARENTS = [-1, 0, 0, 2, 3, -1]


def column(*operators: str) -> pd.Series:
    return pd.Series(names(operators))


@pytest.mark.parametrize(
    ("thread", "start", "duration", "expected"),
    [
        pytest.param([1] * 6, START, DURATION, PARENTS, id="nested"),
        pytest.param([1, 2], [0, 5], [100, 10], [-1, -1], id="other thread"),
        pytest.param([1, 1], [0, 10], [10, 5], [-1, -1], id="starts as another ends"),
    ],
)
def test_the_direct_caller_is_found(
    thread: list[int], start: list[int], duration: list[int], expected: list[int]
) -> None:
    found = callers(np.array(thread), np.array(start), np.array(duration))
    assert found.tolist() == expected


def test_self_times_add_up_to_the_time_in_which_any_operator_ran() -> None:
    own = self_times(DURATION, np.array(PARENTS))
    assert own.tolist() == [15, 5, 10, 59, 1, 20]
    assert own.sum() == 90 + 20
    assert self_times(np.array([10, 11]), np.array([-1, 0])).tolist() == [0, 11], "never negative"


def test_operators_that_compute_are_told_from_bookkeeping() -> None:
    works = does_work(column(*OPERATORS), np.array(PARENTS))
    computing = [name for name, does in zip(OPERATORS, works, strict=True) if does]
    assert computing == ["aten::mm", "aten::add"], "products work although they call others"
    unknown = ("mylib::composite", "mylib::leaf", "aten::add", "SoftmaxBackward0")
    engine = "autograd::engine::evaluate_function: MulBackward0"
    callers_of = np.array([-1, -1, 0, -1, -1])
    found = does_work(column(*unknown, engine), callers_of).tolist()
    assert found == [False, True, True, False, False]
