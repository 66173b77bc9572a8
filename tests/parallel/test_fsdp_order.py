"""Which weights FSDP fetches ahead, given the order in which layers were used."""

import pytest

from lmlab.parallel.fsdp_order import LayerOrder


def seen(layers: list[int], ahead: int = 2) -> LayerOrder:
    """An order that has seen one forward."""
    order = LayerOrder(ahead)
    order.begin_forward()
    for layer in layers:
        order.entered(layer)
    return order


def test_a_first_forward_has_no_forecast() -> None:
    order = LayerOrder(ahead=2)
    order.begin_forward()
    assert [order.entered(layer) for layer in (0, 1, 2)] == [[], [], []]


def test_the_next_forward_is_expected_to_be_like_the_last() -> None:
    order = seen([0, 1, 2, 3])
    order.begin_forward()
    assert [order.entered(layer) for layer in (0, 1, 2, 3)] == [[1, 2], [2, 3], [3], []]


def test_a_layer_used_twice_is_expected_twice() -> None:
    order = seen([0, 1, 0], ahead=1)
    order.begin_forward()
    assert [order.entered(layer) for layer in (0, 1, 0)] == [[1], [0], []]


def test_off_the_expected_path_nothing_is_forecast() -> None:
    order = seen([0, 1, 2], ahead=1)
    order.begin_forward()
    assert [order.entered(layer) for layer in (0, 2, 1)] == [[1], [], []]
    order.begin_forward()
    assert [order.entered(layer) for layer in (0, 2, 1)] == [[2], [1], []]


def test_a_forward_that_used_nothing_teaches_nothing() -> None:
    order = seen([0, 1], ahead=1)
    order.begin_forward()
    order.begin_forward()
    assert order.entered(0) == [1]


def test_backward_is_the_way_back_nearest_first() -> None:
    order = seen([0, 1, 2, 3])
    assert [order.came_back(layer) for layer in (3, 2, 1, 0)] == [[2, 1], [1, 0], [0], []]


def test_backward_may_skip_layers_and_start_over() -> None:
    order = seen([0, 1, 2, 3])
    assert order.came_back(3) == [2, 1]
    assert order.came_back(1) == [0]
    assert order.came_back(3) == [2, 1]
    assert order.came_back(7) == []


def test_backward_tells_the_uses_of_a_layer_apart() -> None:
    order = seen([0, 1, 0], ahead=1)
    assert [order.came_back(layer) for layer in (0, 1, 0)] == [[1], [0], []]


def test_a_layer_of_several_parts_is_reached_once_for_each() -> None:
    order = seen([0, 1, 0, 1], ahead=1)
    found = [order.came_back(layer) for layer in (1, 1, 0, 0, 1, 1, 0)]
    assert found == [[0], [0], [1], [1], [0], [0], []]


def test_the_last_layer_is_known_once_a_forward_has_been_seen() -> None:
    order = seen([0, 1, 0])
    assert not order.is_last(0)
    order.begin_forward()
    last = []
    for layer in (0, 1, 0):
        order.entered(layer)
        last.append(order.is_last(layer))
    assert last == [False, False, True]
    order.begin_forward()
    for layer in (0, 0, 1):
        order.entered(layer)
    assert not order.is_last(1), "not the order that was expected"


@pytest.mark.parametrize(
    ("layer", "expected"), [(2, [3, 4]), (3, [4]), (4, []), (9, [])], ids=lambda v: str(v)
)
def test_recomputation_runs_forward_up_to_where_backward_is(
    layer: int, expected: list[int]
) -> None:
    order = seen([0, 1, 2, 3, 4, 5])
    order.came_back(5)
    order.came_back(4)
    assert order.recomputed(layer) == expected
