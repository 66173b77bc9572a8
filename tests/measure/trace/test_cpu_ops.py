"""Operators of a CPU: each with its own time, those that work told from those that arrange."""

from __future__ import annotations

import numpy as np

from lmlab.measure.trace.cpu_ops import callers, does_work, own_times
from lmlab.measure.trace.frames import Coded

# aten::linear calls aten::t and aten::matmul, which calls aten::mm; then aten::add by itself.
NAMES = ["aten::linear", "aten::t", "aten::matmul", "aten::mm", "aten::resolve_conj", "aten::add"]
START = np.array([0, 2, 10, 12, 13, 100])
DURATION = np.array([90, 5, 70, 60, 1, 20])
THREAD = np.ones(6, dtype=np.int64)


def test_the_direct_caller_is_found() -> None:
    assert callers(THREAD, START, DURATION).tolist() == [-1, 0, 0, 2, 3, -1]


def test_own_times_add_up_to_the_time_in_which_any_operator_ran() -> None:
    own = own_times(DURATION, callers(THREAD, START, DURATION))
    assert own.tolist() == [15, 5, 10, 59, 1, 20]
    assert own.sum() == 90 + 20


def test_operators_of_different_threads_do_not_call_each_other() -> None:
    thread = np.array([1, 2])
    assert callers(thread, np.array([0, 5]), np.array([100, 10])).tolist() == [-1, -1]


def test_an_operator_that_begins_as_another_ends_is_not_called_by_it() -> None:
    both = np.ones(2, dtype=np.int64)
    assert callers(both, np.array([0, 10]), np.array([10, 5])).tolist() == [-1, -1]


def test_rounding_never_makes_a_time_negative() -> None:
    assert own_times(np.array([10, 11]), np.array([-1, 0])).tolist() == [0, 11]


def test_products_work_though_they_call_others_and_dispatchers_do_not() -> None:
    works = does_work(Coded.of(NAMES), callers(THREAD, START, DURATION))
    assert dict(zip(NAMES, works.tolist(), strict=True)) == {
        "aten::linear": False,
        "aten::t": False,
        "aten::matmul": False,
        "aten::mm": True,
        "aten::resolve_conj": False,
        "aten::add": True,
    }


def test_an_unknown_leaf_works_and_an_unknown_composite_arranges() -> None:
    names = Coded.of(["mylib::composite", "mylib::leaf", "aten::add"])
    assert does_work(names, np.array([-1, -1, 0])).tolist() == [False, True, True]


def test_the_autograd_engine_arranges() -> None:
    names = ["autograd::engine::evaluate_function: MulBackward0", "SoftmaxBackward0"]
    assert does_work(Coded.of(names), np.array([-1, -1])).tolist() == [False, False]
