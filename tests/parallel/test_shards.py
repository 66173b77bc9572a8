"""Parameters are dealt out evenly by bytes, and every rank finds the same owners."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lmlab.parallel.shards import Ownership


def tensors_of(sizes: list[int]) -> list[Tensor]:
    return [torch.empty(size, requires_grad=True) for size in sizes]


def owned_sizes(ownership: Ownership, world_size: int) -> list[list[int]]:
    return [[t.numel() for t in ownership.owned_by(rank)] for rank in range(world_size)]


def test_largest_first_to_the_rank_that_has_least() -> None:
    ownership = Ownership(world_size=2)
    ownership.add(tensors_of([1, 5, 2, 4, 3]))
    assert owned_sizes(ownership, 2) == [[5, 2, 1], [4, 3]]
    assert ownership.bytes_by_rank == [8 * 4, 7 * 4]


def test_bytes_count_and_not_elements() -> None:
    ownership = Ownership(world_size=2)
    wide = torch.empty(4, dtype=torch.float64, requires_grad=True)
    ownership.add([*tensors_of([4, 4]), wide])
    assert [ownership.owner(wide), len(ownership.owned_by(1))] == [0, 2]


def test_more_parameters_go_where_there_is_room() -> None:
    ownership = Ownership(world_size=2)
    ownership.add(tensors_of([10, 1]))
    ownership.add(tensors_of([6, 2]))
    assert owned_sizes(ownership, 2) == [[10], [1, 6, 2]]


def test_frozen_parameters_do_not_unbalance_the_trainable() -> None:
    frozen = nn.Parameter(torch.empty(100), requires_grad=False)
    trainable = tensors_of([3, 3])
    ownership = Ownership(world_size=2)
    ownership.add([frozen, *trainable])
    assert {ownership.owner(tensor) for tensor in trainable} == {0, 1}


def test_more_ranks_than_parameters() -> None:
    ownership = Ownership(world_size=3)
    ownership.add(tensors_of([2]))
    assert owned_sizes(ownership, 3) == [[2], [], []]


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 8))
def test_every_parameter_has_one_owner_and_loads_differ_by_one_parameter_at_most(
    sizes: list[int], world_size: int
) -> None:
    ownership = Ownership(world_size)
    ownership.add(tensors_of(sizes))
    owned = owned_sizes(ownership, world_size)
    assert sorted(size for rank in owned for size in rank) == sorted(sizes)
    assert [4 * sum(rank) for rank in owned] == ownership.bytes_by_rank
    loads = ownership.bytes_by_rank
    assert max(loads) - min(loads) <= 4 * max(sizes)
