"""Our AdamW takes the steps that torch's takes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lmlab.model.adamw import AdamW


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"lr": 0.05, "weight_decay": 0.5}, id="strong decay"),
        pytest.param({"lr": 0.01, "weight_decay": 0.0}, id="no decay"),
        pytest.param({"betas": (0.5, 0.7), "eps": 1e-2}, id="short memory, large eps"),
        pytest.param({"betas": (0.0, 0.0)}, id="no memory"),
    ],
)
def test_follows_torch_over_many_steps(settings: dict[str, Any]) -> None:
    ours, theirs = network(), network()

    train(ours, AdamW(ours.parameters(), **settings), steps=30)
    train(theirs, torch.optim.AdamW(theirs.parameters(), **settings), steps=30)

    assert_same_parameters(ours, theirs)


def test_parameter_groups_keep_their_own_settings() -> None:
    ours, theirs = network(), network()

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.0},
            {"params": model[2].parameters(), "betas": (0.8, 0.9)},
        ]

    train(ours, AdamW(groups(ours), lr=0.01), steps=10)
    train(theirs, torch.optim.AdamW(groups(theirs), lr=0.01), steps=10)

    assert_same_parameters(ours, theirs)


def test_decay_is_decoupled_from_the_gradient() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.zeros(1)

    AdamW([weight], lr=0.1, weight_decay=0.5).step()

    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5))


def test_a_parameter_without_gradient_stays_and_gets_no_state() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    used.grad = torch.ones(1)
    optimizer = AdamW([used, unused])

    optimizer.step()

    assert unused.item() == 1.0
    assert unused not in optimizer.state


def test_a_run_resumed_from_a_checkpoint_goes_on_the_same() -> None:
    straight, resumed = network(), network()
    optimizer = AdamW(straight.parameters(), lr=0.05)
    train(straight, optimizer, steps=5)
    resumed.load_state_dict(straight.state_dict())
    second = AdamW(resumed.parameters(), lr=0.05)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    train(straight, optimizer, steps=5)
    train(resumed, second, steps=5)

    assert_same_parameters(straight, resumed)


def test_step_returns_the_loss_of_its_closure() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([weight])

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 9.0
    assert weight.item() < 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: -1.0 is not allowed"),
        ({"eps": -1e-8}, "eps: -1e-08 is not allowed"),
        ({"weight_decay": float("nan")}, "weight_decay: nan is not allowed"),
        ({"betas": (0.9, 1.0)}, r"betas: \(0.9, 1.0\) is not allowed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **settings)
