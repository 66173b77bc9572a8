"""A model small enough to see what autocast does to each of its parts: fc1, ReLU, LayerNorm, fc2.

Autocast does not convert a model. It chooses a type for each operation while it runs: products in
16 bit because their error stays small and tensor cores are fast, reductions in fp32 because sums
lose digits. Nothing in the code shows that choice, so hooks read it off the tensors that pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmlab.jobs.outcome import Unsupported

IN_FEATURES, HIDDEN, OUT_FEATURES, BATCH = 20, 10, 5, 8


class ToyModel(nn.Module):
    """fc1 -> ReLU -> LayerNorm -> fc2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN_FEATURES, HIDDEN, bias=False)
        self.ln = nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUT_FEATURES, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


def observed_dtypes(
    model: ToyModel, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """Types seen in one forward and backward pass under autocast, by component."""
    seen: dict[str, torch.dtype] = {}
    watch_output(model.fc1, "fc1_output", seen)
    watch_output(model.ln, "layernorm_output", seen)
    watch_output(model.fc2, "logits", seen)
    inputs = torch.randn(BATCH, IN_FEATURES, device=device)
    targets = torch.randint(OUT_FEATURES, (BATCH,), device=device)
    with torch.autocast(device.type, dtype=dtype):
        if not torch.is_autocast_enabled(device.type):  # it only warns
            raise Unsupported(f"autocast on this {device.type} does not support {dtype}")
        parameters = {parameter.dtype for parameter in model.parameters()}
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return {
        "parameters": _the_one(parameters),
        **seen,
        "loss": loss.dtype,
        "gradients": _the_one(gradients),
    }


def watch_output(module: nn.Module, name: str, seen: dict[str, torch.dtype]) -> None:
    """Note the type of what the module returns."""

    def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = output.dtype

    module.register_forward_hook(hook)


def _the_one(dtypes: set[torch.dtype]) -> torch.dtype:
    (dtype,) = dtypes
    return dtype
