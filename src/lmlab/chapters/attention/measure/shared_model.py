"""One model that several variants run: parameters, optimizer and batch are shared.

Two models at once would halve the memory that each has, and the largest sizes would run out of
memory only because of the comparison. So there is one model with one optimizer, and a switch in
front of it selects what is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.jobs.workload import Phases, Step, Workload
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.model.loss import cross_entropy

LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""Largest relative difference between the losses of two variants, by precision."""


class Switch(nn.Module):
    """A model with several forward functions over the same parameters."""

    def __init__(
        self, model: nn.Module, forwards: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__()
        self.model = model
        # In a dict, not as submodules: a compiled model would register its parameters again.
        self._forwards = dict(forwards)
        self._selected = next(iter(self._forwards))

    def select(self, name: str) -> None:
        """Use this forward function from now on."""
        self._selected = name

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits by the selected function."""
        return self._forwards[self._selected](tokens)


class SharedStep:
    """A training step that any variant can run, and that can be rebuilt after one failed."""

    def __init__(self, workload: Workload, switch: Switch, device: torch.device) -> None:
        self._workload, self._switch, self._device = workload, switch, device
        self._step = Step(workload, switch, device)

    def rebuild(self) -> None:
        """Drop what a failed step has left: its graph, its gradients, its optimizer state."""
        self._step.zero_grad()
        self._step = Step(self._workload, self._switch, self._device)

    def phases(self, name: str) -> Phases:
        """The phases of one step of this variant, valid until another one is selected."""
        self._switch.select(name)
        return self._step.phases()

    def run(self, name: str) -> None:
        """One whole step."""
        for _, phase in self.phases(name):
            phase()

    def whole_steps(self, names: Sequence[str]) -> list[tuple[str, Callable[[], None]]]:
        """One whole step of each variant, as phases."""
        return [(name, partial(self.run, name)) for name in names]

    def loss(self, name: str) -> float:
        """The loss of the batch; a graph is built, as in training, and dropped."""
        self._switch.select(name)
        tokens, targets = self._workload.batch(self._device)
        precision = self._workload.precision
        with torch.autocast(self._device.type, dtype=precision.dtype, enabled=precision.autocast):
            return cross_entropy(self._switch(tokens), targets).item()

    def peak_bytes(self, name: str) -> int | None:
        """Peak memory of one step; None on a CPU."""
        reset_peak_memory(self._device)
        self.run(name)
        return peak_memory_bytes(self._device)


def check_loss(loss: float, expected: float, precision: str) -> None:
    """Raise `WrongNumbers` if a loss differs from that of the first variant."""
    allowed = LOSS_TOLERANCE[precision]
    if not abs(loss - expected) <= allowed * abs(expected):
        raise WrongNumbers(f"loss {loss:.6g}, but {expected:.6g} with the first variant")
