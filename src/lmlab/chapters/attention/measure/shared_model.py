"""One model that several variants run: parameters, optimizer and batch are shared.

Two models at once would halve the memory that each has, and the largest sizes would run out of
memory only because of the comparison. So there is one model with one optimizer, and a switch in
front of it selects what is called.

`compare` tries every variant (its loss must be that of the first at the same weights, and one step
gives its peak memory), then alternates those that work step by step, by wall clock. A variant that
fails is dropped and the rest go on.

Records: `time` per variant and phase (forward, backward, forward_backward, train_step: sums over
the phases of a step) by wall and device clock, `round_time` (all variants), `loss`, `peak_memory`
(GPU only), `tokens`, `threads`; `first_step_time` where the first step contains a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.chapters.attention.measure.compiling import call_ms
from lmlab.chapters.attention.measure.rounds import alternate, thread_record
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers, refuse_unsupported
from lmlab.jobs.outcome import TOTAL, Outcome
from lmlab.jobs.workload import Phases, Step, Workload
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.device_time import device_times
from lmlab.measure.records import timed, value
from lmlab.measure.statistics import Measurement
from lmlab.model.loss import cross_entropy

Forward = Callable[[Tensor], Tensor]

LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""Largest relative difference between the losses of two variants, by precision."""
SUMS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}


def compare(
    step: SharedStep,
    variants: Variants,
    settings: Mapping[str, Any],
    *,
    needs: Mapping[str, str],
    compiles: bool = False,
) -> Outcome:
    """Try every variant, then time those that work; `needs` names the attention that a variant
    needs to be supported."""
    for trial in (partial(step.check, needs=needs, compiles=compiles), step.note_peak):
        for name in variants.running:
            with variants.attempt(name):
                trial(variants, name)
            if name not in variants.running:
                step.rebuild()
    if running := variants.running:
        times = alternate(partial(_one_round, step, running), settings, step.device)
        variants.records.append(timed(times.pop(TOTAL), "round_time", phase=TOTAL))
        for name in running:
            wall = {part: times[f"{name}.{part}"] for part in SUMS["train_step"]}
            for clock in filter(None, (wall, device_times(step.phases(name), step.device))):
                for phase, parts in SUMS.items():
                    variants.time(name, _summed([clock[part] for part in parts]), phase=phase)
    return variants.outcome(value("tokens", step.workload.shape.tokens, ""), thread_record())


def _one_round(step: SharedStep, names: Sequence[str], clock: PhaseClock) -> None:
    """One training step of each variant, phase by phase."""
    for name in names:
        for phase, run in step.phases(name):
            with clock.phase(f"{name}.{phase}"):
                run()


def _summed(parts: Sequence[Measurement]) -> Measurement:
    """The sum of some phases, step by step."""
    samples = zip(*(part.samples_ms for part in parts), strict=True)
    return replace(parts[0], samples_ms=tuple(map(sum, samples)))


class Switch(nn.Module):
    """A model with several forward functions over the same parameters."""

    def __init__(self, model: nn.Module, forwards: Mapping[str, Forward]) -> None:
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
        self.workload, self._switch, self.device = workload, switch, device
        self._step = Step(workload, switch, device)

    def rebuild(self) -> None:
        """Drop what a failed step has left: its graph, its gradients, its optimizer state."""
        self._step.zero_grad()
        self._step = Step(self.workload, self._switch, self.device)

    def refuse(self, attention: str) -> None:
        """Raise `Unsupported` if this attention is not supported in the model."""
        head_dim = self.workload.shape.d_model // self.workload.shape.num_heads
        refuse_unsupported(attention, self.device, self.workload.precision.dtype, head_dim)

    def phases(self, name: str) -> Phases:
        """The phases of one step of this variant, valid until another one is selected."""
        self._switch.select(name)
        return self._step.phases()

    def run(self, name: str) -> None:
        """One whole step."""
        for _, phase in self.phases(name):
            phase()

    def loss(self, name: str) -> float:
        """The loss of the batch; a graph is built, as in training, and dropped."""
        self._switch.select(name)
        tokens, targets = self.workload.batch(self.device)
        with self.workload.precision_context(self.device):
            return cross_entropy(self._switch(tokens), targets).item()

    def check(
        self, variants: Variants, name: str, *, needs: Mapping[str, str], compiles: bool
    ) -> None:
        """Record the loss; raise `WrongNumbers` if it is not that of the first variant.

        Where variants compile, the very first step of each is timed. Otherwise no step is taken
        yet, so that a wrong variant does not change the weights that all share.
        """
        if name in needs:
            self.refuse(needs[name])
        if compiles:
            first_ms = call_ms(lambda: self.run(name), self.device)
            variants.note(name, "first_step_time", first_ms, "ms")
        loss = self.loss(name)
        variants.note(name, "loss", loss, "")
        first = variants.running[0]
        check_loss(loss, loss if name == first else self.loss(first), self.workload.precision.name)

    def note_peak(self, variants: Variants, name: str) -> None:
        """Record the peak memory of a step."""
        self.run(name)  # the first one creates the optimizer state
        reset_peak_memory(self.device)
        self.run(name)
        variants.note(name, "peak_memory", peak_memory_bytes(self.device), "B")


def check_loss(loss: float, expected: float, precision: str) -> None:
    """Raise `WrongNumbers` if a loss differs from that of the first variant."""
    allowed = LOSS_TOLERANCE[precision]
    if not abs(loss - expected) <= allowed * abs(expected):
        raise WrongNumbers(f"loss {loss:.6g}, but {expected:.6g} with the first variant")
