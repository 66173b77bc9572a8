"""Lists of tensors travel in few messages and arrive as they were."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmlab.parallel.messages import UNDER_WAY, broadcast_all, in_messages
from tests.parallel.launcher import RankPool


@given(st.lists(st.integers(0, 40)), st.integers(1, 300))
def test_messages_hold_every_tensor_once_in_order_within_the_limit(
    sizes: list[int], limit_bytes: int
) -> None:
    tensors = [torch.empty(size) for size in sizes]
    messages = in_messages(tensors, limit_bytes)
    assert [id(t) for message in messages for t in message] == [id(t) for t in tensors]
    for message in messages:
        assert len(message) == 1 or sum(t.nbytes for t in message) <= limit_bytes
    for message, following in pairwise(messages):
        assert sum(t.nbytes for t in message) + following[0].nbytes > limit_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_a_message_holds_one_type(dtype: torch.dtype) -> None:
    first, other, second = torch.empty(2), torch.empty(2, dtype=dtype), torch.empty(2)
    messages = in_messages([first, other, second])
    assert [[id(t) for t in message] for message in messages] == [
        [id(first), id(second)],
        [id(other)],
    ]


def of_rank(rank: int) -> list[list[Tensor]]:
    """More messages than may be under way: packed ones, single ones, a transposed one."""
    numbers = torch.arange(6.0).view(2, 3) + 10 * rank
    messages = [[numbers + i, numbers.flatten() - i] for i in range(UNDER_WAY)]
    return [*messages, [numbers.clone()], [numbers.t()], [numbers.bool(), numbers[:0].bool()]]


def exchange() -> None:
    world_size = dist.get_world_size()
    ours = of_rank(dist.get_rank())
    broadcast_all([(message, i % world_size) for i, message in enumerate(ours)], None)
    for i, message in enumerate(ours):
        expected = of_rank(i % world_size)[i]
        assert all(torch.equal(a, b) for a, b in zip(message, expected, strict=True))


@pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")
def test_messages_from_several_ranks_all_arrive(ranks: RankPool, world_size: int) -> None:
    ranks.run(exchange, world_size)
