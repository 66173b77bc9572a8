"""Gradients in unusual steps: accumulated, missing, used twice, set to none, recomputed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import BucketedDDP, NaiveDDP
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.training import (
    WRAPPERS,
    assert_near,
    backward,
    batch_of,
    gradients,
    loss_of,
    own_part,
)

every_variant = pytest.mark.parametrize("variant", WRAPPERS)
every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def separate_no_sync(ours: Any, batches: list[Tensor]) -> None:
    with ours.no_sync():
        for batch in batches[:-1]:
            loss_of(ours(batch)).backward()
    loss_of(ours(batches[-1])).backward()


def only_no_sync(ours: Any, batches: list[Tensor]) -> None:
    with ours.no_sync():
        for batch in batches:
            loss_of(ours(batch)).backward()


def no_sync_after_a_synchronised_one(ours: Any, batches: list[Tensor]) -> None:
    loss_of(ours(batches[0])).backward()
    with ours.no_sync():
        for batch in batches[1:]:
            loss_of(ours(batch)).backward()


def several_backwards(ours: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        loss_of(ours(batch)).backward()


def forwards_before_backwards(ours: Any, batches: list[Tensor]) -> None:
    losses = [loss_of(ours(batch)) for batch in batches]
    for loss in losses:
        loss.backward()


ACCUMULATIONS: dict[str, Callable[[Any, list[Tensor]], None]] = {
    "no_sync but for the last": separate_no_sync,
    "no_sync for all": only_no_sync,
    "no_sync but for the first": no_sync_after_a_synchronised_one,
    "backward after backward": several_backwards,
    "all forwards first": forwards_before_backwards,
}


def accumulate(variant: str, how: str) -> None:
    module, alone = build("idle layer", seed=0), build("idle layer", seed=0)
    ours = WRAPPERS[variant](module)
    for step in range(3):  # again after zero_grad: nothing of the step before is left
        batches = [batch_of(step, number) for number in range(3)]
        for parameter in (*module.parameters(), *alone.parameters()):
            parameter.grad = None
        ACCUMULATIONS[how](ours, [own_part(batch) for batch in batches])
        ours.finish_gradient_synchronization()
        for batch in batches:
            loss_of(alone(batch)).backward()
        assert_near(gradients(module), gradients(alone), 1e-6)


@pytest.mark.parametrize("how", ACCUMULATIONS)
@every_variant
def test_gradients_of_several_batches_add_up(ranks: RankPool, variant: str, how: str) -> None:
    ranks.run(accumulate, 3, variant=variant, how=how)


class Branches(nn.Module):
    """A step uses the branches that it is told to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(number))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.stem(x)
        return sum((self.branches[i](x) for i in used), start=x)


def use_different_branches(variant: str) -> None:
    torch.manual_seed(0)
    module = Branches(number=5)
    alone = copy.deepcopy(module)
    ours = WRAPPERS[variant](module)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(world_size, 2, 3)
    used_by = [[rank, 3] for rank in range(world_size)]  # branch 4 is used by nobody
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        ours(x[rank], used_by[rank]).square().mean().backward()
        ours.finish_gradient_synchronization()

    for other in range(world_size):
        (alone(x[other], used_by[other]).square().mean() / world_size).backward()
    assert alone.branches[4].weight.grad is None
    assert_near(gradients(module), gradients(alone), 1e-6)


@every_world
@every_variant
def test_a_parameter_without_gradient_counts_as_zeros_unless_no_rank_has_one(
    ranks: RankPool, variant: str, world_size: int
) -> None:
    ranks.run(use_different_branches, world_size, variant=variant)


def where_gradients_live(variant: str, set_to_none: bool) -> None:
    module = build("two types", seed=0)
    ours = WRAPPERS[variant](module)
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in ours.buckets}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(ours(own_part(batch_of(0, step)))).backward()
        in_backward = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        ours.finish_gradient_synchronization()
        after = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        assert in_backward == after == buffers
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["set to none", "set to zero"])
@every_variant
def test_gradients_are_views_into_the_messages_whatever_zero_grad_does(
    ranks: RankPool, variant: str, set_to_none: bool
) -> None:
    ranks.run(where_gradients_live, 2, variant=variant, set_to_none=set_to_none)


class Recomputing(nn.Module):
    """Two layers, the first recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        output: Tensor = self.second(torch.tanh(hidden))
        return output


def recompute(variant: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Recomputing(reentrant)
    x = torch.randn(dist.get_world_size(), 2, 3)
    module(x.flatten(0, 1)).square().mean().backward()
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    backward_through = WRAPPERS[variant](module)
    backward_through(x[dist.get_rank()]).square().mean().backward()
    backward_through.finish_gradient_synchronization()
    assert_near(gradients(module), expected, 1e-6)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@every_variant
def test_gradient_checkpointing(ranks: RankPool, variant: str, reentrant: bool) -> None:
    ranks.run(recompute, 2, variant=variant, reentrant=reentrant)


def fail_once(variant: str) -> None:
    module, alone = build("torch's layers", seed=0), build("torch's layers", seed=0)
    ours = WRAPPERS[variant](module)

    def explode(gradient: Tensor) -> None:
        raise ArithmeticError("in the middle of backward")

    handle = module.embedding.weight.register_hook(explode)
    with pytest.raises(ArithmeticError):
        loss_of(ours(own_part(batch_of(0, 0)))).backward()
    handle.remove()
    ours.finish_gradient_synchronization()
    module.zero_grad(set_to_none=True)
    backward(ours, own_part(batch_of(0, 1)))
    backward(alone, batch_of(0, 1))
    assert_near(gradients(module), gradients(alone), 1e-6)


@every_variant
def test_a_backward_that_failed_leaves_nothing_behind(ranks: RankPool, variant: str) -> None:
    ranks.run(fail_once, 2, variant=variant)


def refuse() -> None:
    sparse = NaiveDDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match=r"^gradient: a sparse one of shape \(4, 2\)"):
        sparse(torch.tensor([1])).sum().backward()

    module = build("frozen parameters", seed=0)
    ours = NaiveDDP(module)
    module.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^requires_grad: was set to True"):
        ours.finish_gradient_synchronization()

    for size in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=rf"^bucket_size_mb: {size} is not allowed"):
            BucketedDDP(module, bucket_size_mb=size)


def test_what_cannot_work_is_said_in_one_line(ranks: RankPool) -> None:
    ranks.run(refuse, 2)


def everything_frozen(variant: str) -> None:
    module = build("torch's layers", seed=0).requires_grad_(False)
    ours = WRAPPERS[variant](module)
    ours(own_part(batch_of(0, 0)))
    ours.finish_gradient_synchronization()


@every_variant
def test_a_model_with_nothing_to_train(ranks: RankPool, variant: str) -> None:
    ranks.run(everything_frozen, 2, variant=variant)
