"""The state of a sharded optimizer: kept once, gathered when saved, loaded at any world size."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lmlab.parallel import ShardedOptimizer
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.test_sharded_optimizer import OPTIMIZERS, every_world
from tests.parallel.training import assert_near, backward, batch_of, parameters


def kept_state() -> tuple[int, int]:
    """Bytes of state on this rank, and of the whole optimizer."""
    module = build("transformer", 0)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    backward(module, batch_of(0, 0))
    optimizer.step()
    kept = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
        if tensor.numel() > 1
    )
    owned = optimizer.ownership.bytes_by_rank[dist.get_rank()]
    assert kept == 2 * owned
    return kept, 2 * sum(p.nbytes for p in module.parameters())


@every_world
def test_state_is_kept_once_and_evenly(ranks: RankPool, world_size: int) -> None:
    kept = ranks.run(kept_state, world_size)
    whole = kept[0][1]
    assert sum(own for own, _ in kept) == whole
    assert max(own for own, _ in kept) < 1.1 * whole / world_size


def some_steps(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss = module(torch.arange(6).view(2, 3) + step % 3).square().mean()
        loss.backward()
        optimizer.step()


def save_half_way(optimizer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    module = build("idle layer", 0)
    sharded = ShardedOptimizer(module.parameters(), optimizer_cls, **settings)
    some_steps(module, sharded, 0, 3)
    sharded.param_groups[0]["lr"] = 0.02
    return module.state_dict(), sharded.state_dict()


def go_on(optimizer: str, model_state: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    module = build("idle layer", 1)
    module.load_state_dict(model_state)
    sharded = ShardedOptimizer(module.parameters(), optimizer_cls, **settings)
    sharded.load_state_dict(state)
    owned = set(sharded.ownership.owned_by(dist.get_rank()))
    assert sharded.state.keys() <= owned
    assert sharded.local.state is sharded.state
    some_steps(module, sharded, 3, 6)
    return parameters(module)


@pytest.mark.parametrize("optimizer", ["AdamW", "our AdamW", "SGD with momentum"])
def test_saved_at_two_ranks_it_goes_on_at_three_and_in_one_process(
    ranks: RankPool, optimizer: str
) -> None:
    saved = ranks.run(save_half_way, 2, optimizer=optimizer)
    model_state, state = saved[0]
    assert saved[1][1]["state"].keys() == state["state"].keys()

    optimizer_cls, settings = OPTIMIZERS[optimizer]
    alone = build("idle layer", 0)
    plain = optimizer_cls(alone.parameters(), **settings)
    some_steps(alone, plain, 0, 3)
    assert plain.state_dict()["state"].keys() == state["state"].keys()
    plain.load_state_dict(copy.deepcopy(state))  # it would step in these very tensors
    assert plain.param_groups[0]["lr"] == 0.02
    some_steps(alone, plain, 3, 6)

    for went_on in ranks.run(go_on, 3, optimizer=optimizer, model_state=model_state, state=state):
        assert_near(went_on, parameters(alone), 1e-6)
