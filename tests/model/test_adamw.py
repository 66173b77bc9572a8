"""AdamW takes the steps that torch's takes."""

from typing import Any

import pytest
import torch
from torch import nn

from lmlab.model.adamw import AdamW


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("first", [{}, {"lr": 0.1, "weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.05, "weight_decay": 0.5},
        {"betas": (0.5, 0.7), "eps": 1e-2},
        {"betas": (0.0, 0.0)},
    ],
    ids=str,
)
def test_follows_torch_in_every_group(settings: dict[str, Any], first: dict[str, Any]) -> None:
    models = network(), network()
    for model, kind in zip(models, (AdamW, torch.optim.AdamW), strict=True):
        groups = [{"params": model[0].parameters(), **first}, {"params": model[2].parameters()}]
        optimizer, generator = kind(groups, **settings), torch.Generator().manual_seed(1)
        for _ in range(30):
            x = torch.randn(4, 6, generator=generator)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    ours, theirs = (list(model.parameters()) for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_decay_is_decoupled_and_a_parameter_without_gradient_is_skipped() -> None:
    decayed, skipped = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.ones(1))
    decayed.grad = torch.zeros(1)
    optimizer = AdamW([decayed, skipped], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert decayed.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5))
    assert skipped.item() == 1.0
    assert skipped not in optimizer.state
    assert optimizer.step(lambda: 9.0) == 9.0, "the loss of its closure"


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("eps", -1e-8), ("weight_decay", float("nan")), ("betas", (0.9, 1.0))],
)
def test_invalid_settings_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        AdamW([nn.Parameter(torch.ones(1))], **{name: value})
