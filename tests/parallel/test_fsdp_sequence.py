"""Which weights FSDP fetches ahead, given the order in which layers were used."""

import pytest

from lmlab.parallel.fsdp_sequence import Sequence


def seen(order: list[int], ahead: int = 2) -> Sequence:
    """A sequence that has seen one forward."""
    sequence = Sequence(ahead)
    sequence.begin_forward()
    for layer in order:
        sequence.entered(layer)
    return sequence


def test_a_first_forward_has_no_forecast() -> None:
    sequence = Sequence(ahead=2)
    sequence.begin_forward()
    assert [sequence.entered(layer) for layer in (0, 1, 2)] == [[], [], []]


def test_the_next_forward_is_expected_to_be_like_the_last() -> None:
    sequence = seen([0, 1, 2, 3])
    sequence.begin_forward()
    assert [sequence.entered(layer) for layer in (0, 1, 2, 3)] == [[1, 2], [2, 3], [3], []]


def test_a_layer_used_twice_is_expected_twice() -> None:
    sequence = seen([0, 1, 0], ahead=1)
    sequence.begin_forward()
    assert [sequence.entered(layer) for layer in (0, 1, 0)] == [[1], [0], []]


def test_off_the_expected_path_nothing_is_forecast() -> None:
    sequence = seen([0, 1, 2], ahead=1)
    sequence.begin_forward()
    assert [sequence.entered(layer) for layer in (0, 2, 1)] == [[1], [], []]
    sequence.begin_forward()
    assert [sequence.entered(layer) for layer in (0, 2, 1)] == [[2], [1], []]


def test_a_forward_that_used_nothing_teaches_nothing() -> None:
    sequence = seen([0, 1], ahead=1)
    sequence.begin_forward()
    sequence.begin_forward()
    assert sequence.entered(0) == [1]


def test_backward_is_the_way_back_nearest_first() -> None:
    sequence = seen([0, 1, 2, 3])
    assert [sequence.came_back(layer) for layer in (3, 2, 1, 0)] == [[2, 1], [1, 0], [0], []]


def test_backward_may_skip_layers_and_start_over() -> None:
    sequence = seen([0, 1, 2, 3])
    assert sequence.came_back(3) == [2, 1]
    assert sequence.came_back(1) == [0]
    assert sequence.came_back(3) == [2, 1]
    assert sequence.came_back(7) == []


def test_backward_tells_the_uses_of_a_layer_apart() -> None:
    sequence = seen([0, 1, 0], ahead=1)
    assert [sequence.came_back(layer) for layer in (0, 1, 0)] == [[1], [0], []]


@pytest.mark.parametrize(
    ("layer", "expected"), [(2, [3, 4]), (3, [4]), (4, []), (9, [])], ids=lambda v: str(v)
)
def test_recomputation_runs_forward_up_to_where_backward_is(
    layer: int, expected: list[int]
) -> None:
    sequence = seen([0, 1, 2, 3, 4, 5])
    sequence.came_back(5)
    sequence.came_back(4)
    assert sequence.recomputed(layer) == expected
