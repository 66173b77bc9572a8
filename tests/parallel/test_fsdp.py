"""FSDP computes what one process computes on all samples, and what torch's fully_shard does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import holds_matrix_weight
from lmlab.parallel.fsdp_blocks import Blocks, each_alone, members_of_lists
from tests.parallel.launcher import RankPool
from tests.parallel.models import MODELS, all_together, build
from tests.parallel.training import (
    STEPS,
    assert_near,
    backward,
    batch_of,
    gradients,
    loss_of,
    own_part,
    own_rows,
    parameters,
    quietly,
    sgd,
)

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def torch_fsdp(module: nn.Module, **options: Any) -> nn.Module:
    """Torch's own, each layer with a matrix by itself and the rest together."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in list(module.modules()):
        if holds_matrix_weight(layer):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def train_beside_one_process_and_torch(model: str, seeds: list[int], theirs_too: bool) -> None:
    for seed in seeds:
        ours = FSDP(build(model, seed + 100 * dist.get_rank()))
        alone = build(model, seed)
        contestants: list[nn.Module] = [ours, alone]
        if theirs_too:
            contestants.append(torch_fsdp(build(model, seed)))
        optimizers = [sgd(contestant.parameters()) for contestant in contestants]
        for step in range(STEPS):
            batch = batch_of(seed, step)
            for contestant, optimizer in zip(contestants, optimizers, strict=True):
                optimizer.zero_grad()
                part = batch if contestant is alone else own_part(batch)
                quietly(backward, contestant, part)
            expected = own_rows(ours, gradients(alone))
            assert_near(gradients(ours.module), expected, 1e-6)
            for optimizer in optimizers:
                optimizer.step()
        whole = ours.gather_full_parameters()
        assert_near(whole, parameters(alone), 1e-6)
        if theirs_too:
            theirs = {n: p.full_tensor().detach() for n, p in contestants[2].named_parameters()}
            assert_near(whole, theirs, 1e-6)


@every_world
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_follow_one_process_and_torch(
    ranks: RankPool, model: str, world_size: int
) -> None:
    theirs_too = model != "tied weights"  # torch's refuses them layer by layer
    ranks.run(
        train_beside_one_process_and_torch,
        world_size,
        model=model,
        seeds=[0, 1] if world_size == 2 else [2],
        theirs_too=theirs_too,
    )


def train_on_one_sample_a_rank(seed: int, blocks: Blocks) -> None:
    ours, alone = FSDP(build("exact", seed), blocks=blocks), build("exact", seed)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for step in range(STEPS):
        batch = batch_of(seed, step, samples_per_rank=1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, own_part(batch))
        backward(alone, batch)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 0.0)
        for optimizer in optimizers:
            optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 0.0)


@pytest.mark.parametrize("blocks", [each_alone, all_together], ids=["alone", "together"])
@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed {seed}")
def test_two_ranks_give_the_bits_of_one_process_where_sums_allow_it(
    ranks: RankPool, seed: int, blocks: Blocks
) -> None:
    ranks.run(train_on_one_sample_a_rank, 2, seed=seed, blocks=blocks)


def backward_after_backward(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        loss_of(model(batch)).backward()


def all_forwards_first(model: nn.Module, batches: list[Tensor]) -> None:
    losses = [loss_of(model(batch)) for batch in batches]
    for loss in losses:
        loss.backward()


def twice_through_one_graph(model: nn.Module, batches: list[Tensor]) -> None:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()


ACCUMULATIONS: dict[str, Callable[[nn.Module, list[Tensor]], None]] = {
    "backward after backward": backward_after_backward,
    "all forwards first": all_forwards_first,
    "twice through one graph": twice_through_one_graph,
}


def accumulate(how: str, blocks: Blocks) -> None:
    for model in ("idle layer", "tied weights", "blocks"):
        ours, alone = FSDP(build(model, seed=0), blocks=blocks), build(model, seed=0)
        for step in range(3):
            batches = [batch_of(step, number) for number in range(3)]
            for parameter in (*ours.parameters(), *alone.parameters()):
                parameter.grad = None
            ACCUMULATIONS[how](ours, [own_part(batch) for batch in batches])
            ours.finish_gradient_synchronization()
            ACCUMULATIONS[how](alone, batches)
            assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)


@pytest.mark.parametrize("blocks", [members_of_lists, all_together], ids=["blocks", "together"])
@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_gradients_of_several_batches_add_up(ranks: RankPool, how: str, blocks: Blocks) -> None:
    ranks.run(accumulate, 3, how=how, blocks=blocks)
