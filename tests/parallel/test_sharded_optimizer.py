"""A sharded optimizer steps like the unsharded one and keeps a part of its state."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lmlab.model.adamw import AdamW
from lmlab.parallel import ShardedOptimizer
from tests.parallel import training
from tests.parallel.launcher import RankPool, on_ranks
from tests.parallel.models import MODELS, build
from tests.parallel.training import STEPS, assert_near, backward, batch_of, parameters

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "own_AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam_foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def step_both(
    sharded: tuple[nn.Module, Optimizer], whole: tuple[nn.Module, Optimizer], steps: int = STEPS
) -> None:
    """Give both the same gradients; the parameters must stay bitwise equal."""
    for step in range(steps):
        for module, optimizer in (sharded, whole):
            optimizer.zero_grad()
            backward(module, batch_of(step))
            optimizer.step()
    assert_near(parameters(sharded[0]), parameters(whole[0]), 0.0)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *((model, "AdamW") for model in (*MODELS, "odd_shapes")),
        *(("mixed_dtypes", optimizer) for optimizer in OPTIMIZERS if optimizer != "AdamW"),
        *(("one_vector", optimizer) for optimizer in OPTIMIZERS),  # one rank owns everything
    ],
)
@on_ranks(2, 3)
def test_steps_are_bitwise_those_of_the_whole_optimizer(model: str, optimizer: str) -> None:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    ours, theirs = build(model), build(model)
    sharded = ShardedOptimizer(ours.parameters(), optimizer_cls, **settings)
    step_both((ours, sharded), (theirs, optimizer_cls(theirs.parameters(), **settings)))


@pytest.mark.parametrize(("model", "dtypes"), [("transformer", 1), ("mixed_dtypes", 2)])
@on_ranks(3)
def test_a_step_broadcasts_each_parameter_once_in_few_messages(model: str, dtypes: int) -> None:
    module = build(model)
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1)
    backward(module, batch_of(0))
    with training.recorded_messages() as log:
        optimizer.step()
    assert 3 <= len(log) <= 3 * dtypes
    assert {message.kind for message in log} == {"broadcast"}
    assert sum(message.numel for message in log) == sum(p.numel() for p in module.parameters())


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": module.embedding.parameters(), "lr": 0.1, "weight_decay": 0.0},
        {"params": list(module.inner.parameters())},
    ]


@on_ranks(2, 3)
def test_parameter_groups_and_schedulers() -> None:
    ours, theirs = build("layers"), build("layers")
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.2}
    sharded = ShardedOptimizer(parameter_groups(ours), torch.optim.AdamW, **settings)
    whole = torch.optim.AdamW(parameter_groups(theirs), **settings)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (sharded, whole)]
    step_both((ours, sharded), (theirs, whole))
    for schedule in schedules:
        schedule.step()
    sharded.add_param_group({"params": ours.head.weight, "lr": 0.05})
    whole.add_param_group({"params": theirs.head.weight, "lr": 0.05})
    step_both((ours, sharded), (theirs, whole))
    assert [g["lr"] for g in sharded.param_groups] == [0.05, 0.005, 0.05]
    assert sharded.param_groups[2].keys() == whole.param_groups[2].keys()


class Scaled(SGD):
    """Its step takes an argument of its own."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] *= factor
        return super().step(closure)


@on_ranks(2)
def test_a_closure_and_keyword_arguments_reach_the_wrapped_optimizer() -> None:
    module = build("tied")
    optimizer = ShardedOptimizer(module.parameters(), Scaled, lr=0.1)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = module(batch_of(0)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    with torch.no_grad():
        losses = [optimizer.step(closure), optimizer.step(closure, factor=0.5)]
    assert losses == calls
    assert losses[1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == 0.05


def some_steps(module: nn.Module, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        module(torch.arange(6).view(2, 3) + step).square().mean().backward()
        optimizer.step()


def save(optimizer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    module = build("unused_layer")
    sharded = ShardedOptimizer(module.parameters(), optimizer_cls, **settings)
    some_steps(module, sharded)
    sharded.param_groups[0]["lr"] = 0.02
    return module.state_dict(), sharded.state_dict()


def resume(optimizer: str, model: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    module = build("unused_layer", seed=1)
    module.load_state_dict(model)
    sharded = ShardedOptimizer(module.parameters(), optimizer_cls, **settings)
    sharded.load_state_dict(state)
    assert sharded.state.keys() <= set(sharded.ownership.owned_by(dist.get_rank()))
    some_steps(module, sharded)
    return parameters(module)


@pytest.mark.parametrize("optimizer", ["AdamW", "own_AdamW", "SGD"])
def test_a_state_dict_resumes_at_another_world_size(ranks: RankPool, optimizer: str) -> None:
    (model, state), (_, of_rank_1) = ranks.run(save, 2, optimizer=optimizer)
    assert of_rank_1["state"].keys() == state["state"].keys()
    alone = build("unused_layer")
    alone.load_state_dict(model)
    optimizer_cls, settings = OPTIMIZERS[optimizer]
    whole = optimizer_cls(alone.parameters(), **settings)
    whole.load_state_dict(copy.deepcopy(state))
    assert whole.param_groups[0]["lr"] == 0.02
    some_steps(alone, whole)
    for resumed in ranks.run(resume, 3, optimizer=optimizer, model=model, state=state):
        assert_near(resumed, parameters(alone), 1e-6)
