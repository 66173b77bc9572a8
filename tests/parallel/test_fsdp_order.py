"""What FSDP predicts from the order in which groups were used."""

import pytest

from lmlab.parallel.fsdp_scheduler import ExecutionOrder


def after_forward(groups: list[int], ahead: int = 2) -> ExecutionOrder:
    order = ExecutionOrder(ahead)
    order.begin_forward()
    for group in groups:
        order.forward(group)
    return order


@pytest.mark.parametrize(
    ("previous", "ahead", "current", "predicted"),
    [
        ([], 2, [0, 1, 2], [[], [], []]),
        ([0, 1, 2, 3], 2, [0, 1, 2, 3], [[1, 2], [2, 3], [3], []]),
        ([0, 1, 0], 1, [0, 1, 0], [[1], [0], []]),
        ([0, 1, 2], 1, [0, 2, 1], [[1], [], []]),
    ],
    ids=["first", "same", "used_twice", "deviates"],
)
def test_a_forward_predicts_the_next_and_whether_a_group_ends_it(
    previous: list[int], ahead: int, current: list[int], predicted: list[list[int]]
) -> None:
    order = after_forward(previous, ahead)
    order.begin_forward()
    order.begin_forward()  # a forward without groups is ignored
    assert not any(order.is_last(group) for group in current)
    assert [order.forward(group) for group in current] == predicted
    assert order.is_last(current[-1]) is (previous == current)


@pytest.mark.parametrize(
    ("ahead", "forward", "backward", "predicted"),
    [
        (2, [0, 1, 2, 3], [3, 2, 1, 0], [[2, 1], [1, 0], [0], []]),
        (2, [0, 1, 2, 3], [3, 1, 3, 7], [[2, 1], [0], [2, 1], []]),
        (1, [0, 1, 0], [0, 1, 0], [[1], [0], []]),
        (1, [0, 1, 0, 1], [1, 1, 0, 0, 1, 1, 0], [[0], [0], [1], [1], [0], [0], []]),
    ],
    ids=["reversed", "skips_and_restarts", "used_twice", "several_outputs"],
)
def test_backward_is_predicted_from_forward(
    ahead: int, forward: list[int], backward: list[int], predicted: list[list[int]]
) -> None:
    order = after_forward(forward, ahead)
    assert [order.backward(group) for group in backward] == predicted


def test_recomputation_runs_up_to_where_backward_is() -> None:
    order = after_forward([0, 1, 2, 3, 4, 5])
    order.backward(5)
    order.backward(4)
    assert [order.recomputed(group) for group in (2, 3, 4, 9)] == [[3, 4], [4], [], []]
