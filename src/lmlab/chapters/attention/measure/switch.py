"""One model, several ways to run it: parameters, optimizer and batch are shared by all arms.

Two models side by side would halve the memory that either has, and the largest sizes would not fit
for a reason that is not theirs. So there is one model with one optimizer, and a switch in front of
it: what differs between the arms is what the switch calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.jobs.workload import Phases, Step, Workload
from lmlab.model.loss import cross_entropy

LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""Largest relative difference of two arms' losses, by precision."""


class Switch(nn.Module):
    """A model that runs one of several ways; `choose` says which."""

    def __init__(self, model: nn.Module, ways: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.model = model
        # Not as modules: a compiled model is the same parameters once more.
        self._ways = dict(ways)
        self._chosen = next(iter(self._ways))

    def choose(self, name: str) -> None:
        """Run this way from now on."""
        self._chosen = name

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, the chosen way."""
        return self._ways[self._chosen](tokens)


class Bench:
    """A step of a workload that any arm can run, and that is made anew after one broke."""

    def __init__(self, workload: Workload, switch: Switch, device: torch.device) -> None:
        self._workload, self._switch, self._device = workload, switch, device
        self.step = Step(workload, switch, device)

    def renew(self) -> None:
        """Forget what a broken step has left: its graph, its gradients, its optimizer's state."""
        self.step.zero_grad()
        self.step = Step(self._workload, self._switch, self._device)

    def phases(self, name: str) -> Phases:
        """The phases of one step, which the arm runs until another is chosen."""
        self._switch.choose(name)
        return self.step.phases()

    def run(self, name: str) -> None:
        """One whole step by an arm."""
        for _, phase in self.phases(name):
            phase()

    def loss(self, name: str) -> float:
        """The loss of the batch by an arm; the graph is made, as in training, and dropped."""
        self._switch.choose(name)
        tokens, targets = self._workload.batch(self._device)
        precision = self._workload.precision
        with torch.autocast(self._device.type, dtype=precision.dtype, enabled=precision.autocast):
            return cross_entropy(self._switch(tokens), targets).item()


def check_loss(loss: float, right: float, precision: str) -> None:
    """Raise `WrongNumbers` if an arm's loss is not that of the first arm."""
    allowed = LOSS_TOLERANCE[precision]
    if not abs(loss - right) <= allowed * abs(right):
        raise WrongNumbers(f"loss {loss:.6g}, by the first arm {right:.6g}")
