"""What a collective under way hands out once it is waited for."""

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.parallel.collectives import (
    Pending,
    start_mean_all_reduce,
    start_mean_reduce_scatter,
)
from tests.parallel.launcher import RankPool


class Done(dist.Work):
    """A message that has arrived."""

    def wait(self, *_: object) -> bool:
        return True


def test_a_sum_is_divided_once_however_often_it_is_waited_for() -> None:
    pending = Pending(Done(), torch.tensor([6.0, 9.0]), divisor=3)

    assert pending.wait().tolist() == [2.0, 3.0]
    assert pending.wait().tolist() == [2.0, 3.0]


def test_what_was_sent_is_let_go_when_it_has_left() -> None:
    pending = Pending(Done(), torch.zeros(1), source=torch.zeros(2))

    pending.wait()

    assert pending.source is None


def means() -> tuple[Tensor, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everywhere = torch.full((4,), 3.0 * rank)
    pieces = torch.arange(2.0 * ranks) + rank
    return (
        start_mean_all_reduce(everywhere, None).wait(),
        start_mean_reduce_scatter(torch.empty(2), pieces, None).wait(),
    )


def test_means_are_those_over_ranks(ranks: RankPool) -> None:
    for rank, (everywhere, own) in enumerate(ranks.run(means, 3)):
        assert everywhere.tolist() == [3.0] * 4
        assert own.tolist() == [2.0 * rank + 1, 2.0 * rank + 2]
