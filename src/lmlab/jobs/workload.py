"""What is run when a model is timed: the model, its batch, and a step cut into phases.

Three modes, because they answer different questions. `forward` computes logits without a gradient,
as inference does. `forward_backward` adds the loss and the gradients. `train_step` is what training
repeats: zero_grad, forward with loss, backward, AdamW. Gradients are set to None, not to zero, so
that backward writes them instead of adding to them, in both modes that have one.

Tokens are random and drawn on the CPU: the same batch on every device, and no kernel runs before
the model's own. Autocast covers the forward pass and the loss; backward follows the types that
forward chose. fp16 runs without loss scaling: its times are right, its gradients may underflow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lmlab.jobs.outcome import Unsupported
from lmlab.measure.precision import Precision, precision_named
from lmlab.model import loading
from lmlab.model.adamw import AdamW
from lmlab.model.cost import Mode
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point

Phases: TypeAlias = list[tuple[str, Callable[[], None]]]

# What the cost model assumes, and the name for the attention of a model that takes no choice.
OWN_ATTENTION = "naive"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch, as a point asks for them."""

    model: str
    """Import path of the class."""
    shape: ModelShape
    rope_theta: float
    attention: str
    precision: Precision
    mode: Mode
    seed: int

    @property
    def is_ours(self) -> bool:
        """Whether the cost model describes this model."""
        return self.model == loading.DEFAULT

    def build(self, device: torch.device) -> nn.Module:
        """The model with random weights, made on the device."""
        torch.manual_seed(self.seed)
        model_class = loading.load_class(self.model)
        return model_class(**self._arguments(model_class, device)).to(device)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random tokens and their successors, each (batch, context)."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.shape.batch, self.shape.context + 1)
        tokens = torch.randint(self.shape.vocab_size, size, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def precision_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast where the precision asks for it."""
        if not self.precision.autocast:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.precision.dtype)

    def _arguments(self, model_class: type[nn.Module], device: torch.device) -> dict[str, Any]:
        """Constructor arguments; a user's class need not know about attention or devices."""
        accepted = inspect.signature(model_class).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        if "attention" not in accepted and not takes_any and self.attention != OWN_ATTENTION:
            raise Unsupported(
                f"{self.model} takes no attention argument, so attention = {self.attention!r} "
                f"cannot be chosen; {OWN_ATTENTION!r} selects the model's own"
            )
        optional = {"attention": self.attention, "device": device}
        return {
            "vocab_size": self.shape.vocab_size,
            "context_length": self.shape.context,
            "d_model": self.shape.d_model,
            "num_layers": self.shape.num_layers,
            "num_heads": self.shape.num_heads,
            "d_ff": self.shape.d_ff,
            "rope_theta": self.rope_theta,
            **{key: value for key, value in optional.items() if takes_any or key in accepted},
        }


def workload_of(point: Point) -> Workload:
    """Read a point's parameters and settings; they were checked when the study was."""
    asked = {**point.settings, **point.parameters}
    return Workload(
        model=asked["model"],
        shape=ModelShape(**{key: asked[key] for key in ModelShape.__dataclass_fields__}),
        rope_theta=asked["rope_theta"],
        attention=asked["attention"],
        precision=precision_named(asked["precision"]),
        mode=asked["mode"],
        seed=asked["seed"],
    )


class Step:
    """One step of a workload, phase by phase."""

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self._workload = workload
        self._device = device
        self._model = model
        self._optimizer = AdamW(model.parameters())
        self._tokens, self._targets = workload.batch(device)
        self._loss: Tensor | None = None

    def phases(self) -> Phases:
        """The named phases of the workload's mode, in order."""
        if self._workload.mode == "forward":
            return [("forward", self.infer)]
        if self._workload.mode == "forward_backward":
            return [("forward", self.forward), ("backward", self.backward)]
        return [
            ("zero_grad", self.zero_grad),
            ("forward", self.forward),
            ("backward", self.backward),
            ("optimizer", self.update),
        ]

    def infer(self) -> None:
        """Logits, without a graph."""
        with torch.no_grad(), self._workload.precision_context(self._device):
            self._model(self._tokens)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def forward(self) -> None:
        """Logits and loss, with the graph that backward needs."""
        with self._workload.precision_context(self._device):
            self._loss = cross_entropy(self._model(self._tokens), self._targets)

    def backward(self) -> None:
        """Gradients of the last forward's loss."""
        assert self._loss is not None, "backward comes after forward"
        self._loss.backward()
        self._loss = None

    def update(self) -> None:
        """One AdamW step."""
        self._optimizer.step()
