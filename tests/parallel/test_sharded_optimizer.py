"""An optimizer in shards steps as the whole one does, and keeps a part of its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmlab.model.adamw import AdamW
from lmlab.parallel import FlatDDP, ShardedOptimizer
from tests.parallel.launcher import RankPool
from tests.parallel.models import MODELS, build
from tests.parallel.recording import recorded_messages
from tests.parallel.training import STEPS, assert_near, backward, batch_of, own_part, parameters

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "our AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam with foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def step_beside(model: str, optimizer: str, theirs_too: bool, seed: int) -> None:
    """The same gradients for all: what differs can only be the optimizer."""
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    ours, whole, torchs = (build(model, seed) for _ in range(3))
    trained = [
        (ours, ShardedOptimizer(ours.parameters(), optimizer_cls, **settings)),
        (whole, optimizer_cls(whole.parameters(), **settings)),
    ]
    if theirs_too:
        # Imported here, so that only rank processes pay the seconds that it takes.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        trainable = [p for p in torchs.parameters() if p.requires_grad]
        trained.append((torchs, ZeroRedundancyOptimizer(trainable, optimizer_cls, **settings)))
    for step in range(STEPS):
        for module, optimizer_object in trained:
            optimizer_object.zero_grad()
            backward(module, batch_of(seed, step))
            optimizer_object.step()
    assert_near(parameters(ours), parameters(whole), 0.0)
    if theirs_too:
        assert_near(parameters(ours), parameters(torchs), 0.0)


@every_world
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_give_the_bits_of_the_whole_optimizer_and_of_torch(
    ranks: RankPool, model: str, world_size: int
) -> None:
    theirs_too = model != "two types"  # torch's takes one type only
    for seed in (0, 1):
        ranks.run(
            step_beside,
            world_size,
            model=model,
            optimizer="AdamW",
            theirs_too=theirs_too,
            seed=seed,
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(ranks: RankPool, optimizer: str) -> None:
    for model in ("torch's layers", "two types"):
        ranks.run(step_beside, 3, model=model, optimizer=optimizer, theirs_too=False, seed=0)


def train_with_data_parallelism(seed: int) -> None:
    module, alone = build("transformer", seed), build("transformer", seed)
    ours = FlatDDP(module)
    sharded = ShardedOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    whole = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        sharded.zero_grad()
        whole.zero_grad()
        backward(ours, own_part(batch_of(seed, step)))
        backward(alone, batch_of(seed, step))
        sharded.step()
        whole.step()
    assert_near(parameters(module), parameters(alone), 1e-6)


@every_world
def test_with_data_parallelism_ten_steps_follow_one_process(
    ranks: RankPool, world_size: int
) -> None:
    for seed in range(3):
        ranks.run(train_with_data_parallelism, world_size, seed=seed)


def messages_of_a_step(model: str) -> list[tuple[str, torch.dtype, int]]:
    module = build(model, 0)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    backward(module, batch_of(0, 0))
    with recorded_messages() as log:
        optimizer.step()
    return [(message.kind, message.dtype, message.numel) for message in log]


@every_world
def test_updates_come_back_in_one_message_an_owner_and_type(
    ranks: RankPool, world_size: int
) -> None:
    for model, types in (("transformer", 1), ("two types", 2)):
        sent = ranks.run(messages_of_a_step, world_size, model=model)[0]
        assert world_size <= len(sent) <= world_size * types
        assert {kind for kind, _, _ in sent} == {"broadcast"}
        numbers = sum(p.numel() for p in build(model, 0).parameters())
        assert sum(numel for _, _, numel in sent) == numbers


class Uneven(nn.Module):
    """First dimensions that two and three do not divide; a scalar; a matrix that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(7, 3), (5,), (1, 1), (11, 2), ()]
        self.weights = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)
        self.transposed = nn.Parameter(torch.randn(4, 5, generator=generator).t())

    def forward(self) -> Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


def step_uneven() -> None:
    ours, whole = Uneven(), Uneven()
    sharded = ShardedOptimizer(ours.parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for module, optimizer in ((ours, sharded), (whole, plain)) * 3:
        optimizer.zero_grad()
        module().backward()
        optimizer.step()
    assert_near(parameters(ours), parameters(whole), 0.0)


@every_world
def test_parameters_of_any_shape(ranks: RankPool, world_size: int) -> None:
    ranks.run(step_uneven, world_size)


def step_one_parameter(optimizer: str) -> list[float]:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    weight = nn.Parameter(torch.ones(2))
    sharded = ShardedOptimizer([weight], optimizer_cls, **settings)
    for _ in range(2):
        sharded.zero_grad()
        weight.square().sum().backward()
        sharded.step()
    return weight.tolist()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rank_may_own_nothing(ranks: RankPool, optimizer: str) -> None:
    first, second, third = ranks.run(step_one_parameter, 3, optimizer=optimizer)
    assert first == second == third
    assert first != [1.0, 1.0]


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": module.embedding.parameters(), "lr": 0.1, "weight_decay": 0.0},
        {"params": list(module.inner.parameters())},
    ]


def step_with_groups_and_schedule() -> None:
    ours, whole = build("torch's layers", 0), build("torch's layers", 0)
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.2}
    sharded = ShardedOptimizer(groups_of(ours), torch.optim.AdamW, **settings)
    plain = torch.optim.AdamW(groups_of(whole), **settings)
    trained: list[tuple[nn.Module, Optimizer]] = [(ours, sharded), (whole, plain)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for _, o in trained]
    for step in range(6):
        if step == 3:
            sharded.add_param_group({"params": ours.head.weight, "lr": 0.05})
            plain.add_param_group({"params": whole.head.weight, "lr": 0.05})
            for schedule in schedules:  # a scheduler does not know of groups that come later
                schedule.base_lrs.append(0.05)
        for (module, optimizer), schedule in zip(trained, schedules, strict=True):
            optimizer.zero_grad()
            backward(module, batch_of(0, step))
            optimizer.step()
            schedule.step()
        assert [g["lr"] for g in sharded.param_groups] == [g["lr"] for g in plain.param_groups]
    assert_near(parameters(ours), parameters(whole), 0.0)
    assert sharded.param_groups[2].keys() == plain.param_groups[2].keys()


@every_world
def test_parameter_groups_more_groups_and_schedulers(ranks: RankPool, world_size: int) -> None:
    ranks.run(step_with_groups_and_schedule, world_size)


def step_with_closure() -> float:
    module = build("torch's layers", 0)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = module(batch_of(0, 0)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    with torch.no_grad():
        first = optimizer.step(closure)
    second = optimizer.step(closure)
    assert [first, second] == calls
    assert second < first
    return second


def test_a_closure_is_called_once_with_gradients_enabled(ranks: RankPool) -> None:
    losses = ranks.run(step_with_closure, 3)
    assert losses[0] == losses[1] == losses[2]


def tied_in_the_list() -> int:
    module = build("tied weights", 0)
    named_twice = [module.embedding.weight, module.head.weight, module.inner.weight]
    optimizer = ShardedOptimizer(named_twice, torch.optim.SGD, lr=0.1)
    return len(optimizer.param_groups[0]["params"])


def test_a_tied_weight_listed_twice_is_one_parameter(ranks: RankPool) -> None:
    assert ranks.run(tied_in_the_list, 2) == [2, 2]


def refuse() -> None:
    module = build("torch's layers", 0)
    with pytest.raises(ValueError, match=r"^optimizer_cls: LBFGS treats all parameters as one"):
        ShardedOptimizer(module.parameters(), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="lr: -1"):
        ShardedOptimizer(module.parameters(), AdamW, lr=-1)
    optimizer = ShardedOptimizer(module.inner.parameters(), torch.optim.SGD, lr=0.1)
    other = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())


def test_what_cannot_work_is_said(ranks: RankPool) -> None:
    ranks.run(refuse, 2)
