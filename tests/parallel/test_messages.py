"""The building blocks: collectives, coalesced messages and the assignment of parameters."""

from itertools import pairwise

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lmlab.parallel.coalesce import IN_FLIGHT, broadcast_coalesced, coalesce
from lmlab.parallel.collectives import Pending, start_mean_all_reduce, start_mean_reduce_scatter
from lmlab.parallel.ownership import Ownership
from tests.parallel.launcher import on_ranks


class Done(dist.Work):
    """A collective that has finished."""

    def wait(self, *_: object) -> bool:
        return True


def test_a_sum_is_divided_once_and_what_was_sent_is_released() -> None:
    pending = Pending(Done(), torch.tensor([6.0, 9.0]), source=torch.zeros(2), divisor=3)
    assert pending.wait().tolist() == pending.wait().tolist() == [2.0, 3.0]
    assert pending.source is None


@on_ranks(3)
def test_means_are_over_ranks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everywhere = start_mean_all_reduce(torch.full((4,), 3.0 * rank), None).wait()
    assert everywhere.tolist() == [3.0] * 4
    pieces = torch.arange(2.0 * world_size) + rank
    own = start_mean_reduce_scatter(torch.empty(2), pieces, None).wait()
    assert own.tolist() == [2.0 * rank + 1, 2.0 * rank + 2]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())), st.integers(1, 300))
def test_messages_contain_each_tensor_once_in_order_within_the_limit(
    sizes: list[tuple[int, bool]], limit_bytes: int
) -> None:
    dtypes = {True: torch.float64, False: torch.float32}
    tensors = [torch.empty(size, dtype=dtypes[wide]) for size, wide in sizes]
    messages = coalesce(tensors, limit_bytes)
    for dtype in dtypes.values():
        of_dtype = [message for message in messages if message[0].dtype == dtype]
        sent = [tensor for message in of_dtype for tensor in message]
        assert [id(t) for t in sent] == [id(t) for t in tensors if t.dtype == dtype]
        for message in of_dtype:
            assert len(message) == 1 or sum(t.nbytes for t in message) <= limit_bytes
        for message, following in pairwise(of_dtype):
            assert sum(t.nbytes for t in message) + following[0].nbytes > limit_bytes


def messages_of(rank: int) -> list[list[Tensor]]:
    """More messages than may be in flight: packed, single and transposed tensors."""
    numbers = torch.arange(6.0).view(2, 3) + 10 * rank
    messages = [[numbers + i, numbers.flatten() - i] for i in range(IN_FLIGHT)]
    return [*messages, [numbers.clone()], [numbers.t()], [numbers.bool(), numbers[:0].bool()]]


@on_ranks(3)
def test_broadcasts_from_several_ranks_arrive() -> None:
    own = messages_of(dist.get_rank())
    sources = [i % dist.get_world_size() for i in range(len(own))]
    broadcast_coalesced(zip(own, sources, strict=True), None)
    for i, source in enumerate(sources):
        for received, sent in zip(own[i], messages_of(source)[i], strict=True):
            assert torch.equal(received, sent)


def owned_sizes(ownership: Ownership, world_size: int) -> list[list[int]]:
    return [[t.numel() for t in ownership.owned_by(rank)] for rank in range(world_size)]


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 8))
def test_loads_differ_by_one_parameter_at_most(sizes: list[int], world_size: int) -> None:
    ownership = Ownership(world_size)
    ownership.add([torch.empty(size, requires_grad=True) for size in sizes])
    owned = owned_sizes(ownership, world_size)
    assert sorted(size for rank in owned for size in rank) == sorted(sizes)
    loads = ownership.bytes_by_rank
    assert loads == [4 * sum(rank) for rank in owned]
    assert max(loads) - min(loads) <= 4 * max(sizes)


def test_the_largest_parameter_goes_to_the_rank_with_the_fewest_bytes() -> None:
    ownership = Ownership(world_size=2)
    ownership.add(nn.Parameter(torch.empty(size)) for size in (1, 5, 2, 4, 3))
    assert owned_sizes(ownership, 2) == [[5, 2, 1], [4, 3]]
    wide = nn.Parameter(torch.empty(4, dtype=torch.float64))
    ownership.add([nn.Parameter(torch.empty(3)), wide])  # bytes count, not elements
    assert owned_sizes(ownership, 2) == [[5, 2, 1, 3], [4, 3, 4]]


def test_frozen_parameters_do_not_affect_the_balance_of_trainable_ones() -> None:
    frozen = nn.Parameter(torch.empty(100), requires_grad=False)
    trainable = [nn.Parameter(torch.empty(3)) for _ in range(2)]
    ownership = Ownership(world_size=2)
    ownership.add([frozen, *trainable])
    assert {ownership.owner[parameter] for parameter in trainable} == {0, 1}
