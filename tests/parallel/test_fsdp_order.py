"""What FSDP predicts from the order in which groups were used."""

import pytest

from lmlab.parallel.fsdp_order import ExecutionOrder


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
def test_forward_is_predicted_from_the_previous_one(
    previous: list[int], ahead: int, current: list[int], predicted: list[list[int]]
) -> None:
    order = after_forward(previous, ahead)
    order.begin_forward()
    assert [order.forward(group) for group in current] == predicted


def test_a_forward_without_groups_is_ignored() -> None:
    order = after_forward([0, 1], ahead=1)
    order.begin_forward()
    order.begin_forward()
    assert order.forward(0) == [1]


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


def test_the_last_group_is_known_if_a_forward_runs_as_predicted() -> None:
    order = after_forward([0, 1, 0])
    assert not order.is_last(0)
    for groups, expected in (([0, 1, 0], [False, False, True]), ([0, 0, 1], [False] * 3)):
        order.begin_forward()
        last = []
        for group in groups:
            order.forward(group)
            last.append(order.is_last(group))
        assert last == expected


@pytest.mark.parametrize(("group", "predicted"), [(2, [3, 4]), (3, [4]), (4, []), (9, [])])
def test_recomputation_runs_up_to_where_backward_is(group: int, predicted: list[int]) -> None:
    order = after_forward([0, 1, 2, 3, 4, 5])
    order.backward(5)
    order.backward(4)
    assert order.recomputed(group) == predicted
