"""Several variants of one model, here a training step with different attention functions.

Two models at once would halve the memory of each, and the largest sizes would run out of memory
only because of the comparison. So parameters, optimizer and batch are shared, and a switch in front
of the model selects the forward function.

`compare` tries every variant (its loss must match the first variant's at the same weights, and a
step gives its peak memory), then alternates those that work, step by step, by wall clock. A variant
that fails is dropped and the rest go on.

Records: `time` per variant and phase (forward, backward, forward_backward, train_step: sums over
the phases of a step) by wall and device clock, `round_time` (all variants), `loss`, `peak_memory`
(GPU only), `tokens`, `threads`; `first_step_time` where the first step contains a compilation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.chapters.attention.measure.compiling import call_ms
from lmlab.chapters.attention.measure.rounds import alternate, thread_record
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers, refuse_unsupported
from lmlab.jobs.outcome import TOTAL, Outcome, Unsupported
from lmlab.jobs.workload import Phases, Step, Workload, workload_of
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.device_time import device_times
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import timed, value
from lmlab.measure.statistics import Measurement
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import CausalSelfAttention
from lmlab.study.points import Point

Forward = Callable[[Tensor], Tensor]

LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""Largest relative difference between the losses of two variants, by precision."""
SUMS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare attention variants inside one model."""
    names, workload = point.settings["variants"], workload_of(point)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        forwards = {name: with_attention(model, name) for name in names}
        shared = SharedModel(workload, model, forwards, device)
        needs = {name: name for name in names}
        return compare(shared, Variants(names, device), point.settings, needs=needs)


def with_attention(model: nn.Module, name: str) -> Forward:
    """A forward function that sets this attention in every layer before it calls the model."""

    def forward(tokens: Tensor) -> Tensor:
        layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
        if not layers:
            raise Unsupported("attention can be exchanged in the study's own model only")
        attention = registry.load(name)
        for layer in layers:
            layer.attention = attention
        logits: Tensor = model(tokens)
        return logits

    return forward


def compare(
    model: "SharedModel",
    variants: Variants,
    settings: Mapping[str, Any],
    *,
    needs: Mapping[str, str],
    compiles: bool = False,
) -> Outcome:
    """Try every variant, then time those that work; `needs` maps a variant to the attention
    that the device must support for it."""

    def one_round(clock: PhaseClock) -> None:
        for name in variants.running:
            for phase, run in model.phases(name):
                with clock.phase(f"{name}.{phase}"):
                    run()

    for trial in (partial(model.check, needs=needs, compiles=compiles), model.note_peak):
        for name in variants.running:
            with variants.attempt(name):
                trial(variants, name)
            if name not in variants.running:
                model.rebuild()
    if running := variants.running:
        times = alternate(one_round, settings, model.device)
        variants.records.append(timed(times.pop(TOTAL), "round_time", phase=TOTAL))
        for name in running:
            wall = {part: times[f"{name}.{part}"] for part in SUMS["train_step"]}
            for clock in filter(None, (wall, device_times(model.phases(name), model.device))):
                for phase, parts in SUMS.items():
                    variants.time(name, _summed([clock[part] for part in parts]), phase=phase)
    return variants.outcome(value("tokens", model.workload.shape.tokens, ""), thread_record())


def _summed(parts: Sequence[Measurement]) -> Measurement:
    samples = zip(*(part.samples_ms for part in parts), strict=True)
    return replace(parts[0], samples_ms=tuple(map(sum, samples)))


class SharedModel(nn.Module):
    """A model with several forward functions over the same parameters, one of them selected, and
    a training step, which is rebuilt after a variant fails."""

    def __init__(
        self, workload: Workload, model: nn.Module, forwards: Mapping[str, Forward],
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.workload, self.model, self.device = workload, model, device
        # In a dict, not as submodules: a compiled model would register its parameters again.
        self._forwards = dict(forwards)
        self.selected = next(iter(self._forwards))
        self.rebuild()

    def forward(self, tokens: Tensor) -> Tensor:
        return self._forwards[self.selected](tokens)

    def rebuild(self) -> None:
        """Discard what a failed step leaves behind: graph, gradients and optimizer state."""
        self.zero_grad(set_to_none=True)
        self._step = Step(self.workload, self, self.device)

    def phases(self, name: str) -> Phases:
        """The phases of one step of this variant, valid until another one is selected."""
        self.selected = name
        return self._step.phases()

    def run(self, name: str) -> None:
        """One whole step."""
        for _, phase in self.phases(name):
            phase()

    def loss(self, name: str) -> float:
        """The loss of the batch; a graph is built, as in training, and dropped."""
        self.selected = name
        tokens, targets = self.workload.batch(self.device)
        with self.workload.precision_context(self.device):
            return cross_entropy(self(tokens), targets).item()

    def check(
        self, variants: Variants, name: str, *, needs: Mapping[str, str], compiles: bool
    ) -> None:
        """Record the loss; raise `WrongNumbers` if it differs from the first variant's. If variants
        compile, also time the first step of each. Otherwise take no step yet, so that a wrong
        variant cannot change the shared weights."""
        shape, precision = self.workload.shape, self.workload.precision
        if name in needs:
            head_dim = shape.d_model // shape.num_heads
            refuse_unsupported(needs[name], self.device, precision.dtype, head_dim)
        if compiles:
            first_ms = call_ms(lambda: self.run(name), self.device)
            variants.note(name, "first_step_time", first_ms, "ms")
        loss, first = self.loss(name), variants.running[0]
        variants.note(name, "loss", loss, "")
        expected = loss if name == first else self.loss(first)
        if not abs(loss - expected) <= LOSS_TOLERANCE[precision.name] * abs(expected):
            raise WrongNumbers(f"loss {loss:.6g}, but {expected:.6g} with the first variant")

    def note_peak(self, variants: Variants, name: str) -> None:
        """Record the peak memory of a step."""
        self.run(name)  # the first one creates the optimizer state
        reset_peak_memory(self.device)
        self.run(name)
        variants.note(name, "peak_memory", peak_memory_bytes(self.device), "B")
