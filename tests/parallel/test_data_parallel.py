"""Data parallelism computes what one process computes on all samples, and what torch's own does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.launcher import RankPool
from tests.parallel.models import MODELS, build
from tests.parallel.training import (
    STEPS,
    WRAPPERS,
    assert_near,
    backward,
    batch_of,
    gradients,
    own_part,
    parameters,
    sgd,
    torch_ddp,
)

every_variant = pytest.mark.parametrize("variant", WRAPPERS)
every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def train_beside_one_process_and_torch(variant: str, model: str, seeds: list[int]) -> None:
    for seed in seeds:
        # Ranks start from different weights and buffers: those of rank 0 must win.
        module = build(model, seed + 100 * dist.get_rank())
        ours = WRAPPERS[variant](module)
        alone, torchs = build(model, seed), build(model, seed)
        contestants = [ours, torch_ddp(torchs), alone]
        optimizers = [sgd(contestant.parameters()) for contestant in contestants]
        for step in range(STEPS):
            batch = batch_of(seed, step)
            for contestant, optimizer in zip(contestants, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=True)
                backward(contestant, batch if contestant is alone else own_part(batch))
            assert_near(gradients(module), gradients(alone), 1e-6)
            assert_near(gradients(module), gradients(torchs), 1e-6)
            for optimizer in optimizers:
                optimizer.step()
        assert_near(parameters(module), parameters(alone), 1e-6)
        assert_near(parameters(module), parameters(torchs), 1e-6)


@every_world
@pytest.mark.parametrize("model", MODELS)
@every_variant
def test_ten_steps_follow_one_process_and_torch(
    ranks: RankPool, variant: str, model: str, world_size: int
) -> None:
    seeds = [0, 1] if world_size == 2 else [2]
    ranks.run(
        train_beside_one_process_and_torch, world_size, variant=variant, model=model, seeds=seeds
    )


def train_on_one_sample_a_rank(variant: str, seed: int) -> None:
    module, alone = build("exact", seed), build("exact", seed)
    ours = WRAPPERS[variant](module)
    optimizers = [sgd(module.parameters()), sgd(alone.parameters())]
    for step in range(STEPS):
        batch = batch_of(seed, step, samples_per_rank=1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, own_part(batch))
        backward(alone, batch)
        assert_near(gradients(module), gradients(alone), 0.0)
        for optimizer in optimizers:
            optimizer.step()
    assert_near(parameters(module), parameters(alone), 0.0)


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed {seed}")
@every_variant
def test_two_ranks_give_the_bits_of_one_process_where_sums_allow_it(
    ranks: RankPool, variant: str, seed: int
) -> None:
    ranks.run(train_on_one_sample_a_rank, 2, variant=variant, seed=seed)


class Buffers(nn.Module):
    """One parameter and buffers of several kinds."""

    def __init__(self, content: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), content).t())  # not contiguous
        self.register_buffer("number", torch.tensor(content))
        self.register_buffer("counter", torch.tensor([int(content)]))
        self.register_buffer("mask", torch.tensor([content > 0]))
        self.register_buffer("table", torch.full((3,), content), persistent=False)
        self.register_buffer("nothing", torch.empty(0))


def wrap_what_differs(variant: str) -> list[Any]:
    module = Buffers(content=float(1 - dist.get_rank()))
    WRAPPERS[variant](module)
    return [t.tolist() for t in (module.weight, *module.buffers())]


@every_world
@every_variant
def test_parameters_and_buffers_start_as_those_of_rank_0(
    ranks: RankPool, variant: str, world_size: int
) -> None:
    of_rank_0 = [t.tolist() for t in (Buffers(1.0).weight, *Buffers(1.0).buffers())]
    assert ranks.run(wrap_what_differs, world_size, variant=variant) == [of_rank_0] * world_size


def save_and_load(variant: str) -> None:
    module = build("torch's layers", seed=0)
    ours = WRAPPERS[variant](module)
    other = build("torch's layers", seed=1).state_dict()

    assert ours.state_dict().keys() == module.state_dict().keys()
    ours.load_state_dict(other)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, other[name])
    backward(ours, batch_of(0, 0))
    assert all(p.grad is not None for p in module.parameters())
    with pytest.raises(ValueError, match=r"^assign: True is not allowed"):
        ours.load_state_dict(other, assign=True)


@every_variant
def test_the_state_dictionary_is_the_modules(ranks: RankPool, variant: str) -> None:
    ranks.run(save_and_load, 2, variant=variant)
