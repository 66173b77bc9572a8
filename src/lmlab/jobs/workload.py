"""What a model measurement runs: the model, its batch, and a step split into phases.

`forward` computes logits without a gradient, as inference does. `forward_backward` adds the loss
and the gradients. `train_step` is what training repeats: zero_grad, forward with loss, backward,
AdamW. Gradients are set to None, so that backward writes them instead of adding to them.

Tokens are random and drawn on the CPU: the same batch on every device, and no kernel runs before
the model's own. Autocast covers the forward pass and the loss; backward follows the types that
forward chose. fp16 runs without loss scaling: its times are right, its gradients may underflow.
"""

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

# What the cost model assumes; also stands for a user model's built-in attention.
OWN_ATTENTION = "naive"
FROM_SHAPE = ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch, as a point asks for them."""

    model: str  # import path of the class
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
        """Build the model with random weights on the device; a user's class need not accept
        `attention` or `device`."""
        model_class = loading.load_class(self.model)
        accepted = inspect.signature(model_class).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        if "attention" not in accepted and not takes_any and self.attention != OWN_ATTENTION:
            raise Unsupported(
                f"{self.model} takes no attention argument, so attention = {self.attention!r} "
                f"cannot be chosen; {OWN_ATTENTION!r} selects the model's own"
            )
        optional = {"attention": self.attention, "device": device}
        torch.manual_seed(self.seed)
        return model_class(
            context_length=self.shape.context,
            rope_theta=self.rope_theta,
            **{key: getattr(self.shape, key) for key in FROM_SHAPE},
            **{key: value for key, value in optional.items() if takes_any or key in accepted},
        ).to(device)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random tokens and next-token targets, each (batch, context)."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.shape.batch, self.shape.context + 1)
        tokens = torch.randint(self.shape.vocab_size, size, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def precision_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast where the precision asks for it."""
        if not self.precision.autocast:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.precision.dtype)


def workload_of(point: Point, **more: Any) -> Workload:
    """Build the workload from a point's parameters and settings, validated with the study, and from
    `more` keys that a point lacks, such as the mode."""
    asked = {**point.settings, **point.parameters, **more}
    return Workload(
        shape=ModelShape(**{key: asked[key] for key in ModelShape.__dataclass_fields__}),
        precision=precision_named(asked["precision"]),
        **{key: asked[key] for key in ("model", "rope_theta", "attention", "mode", "seed")},
    )


class Step:
    """One step of a workload, phase by phase."""

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self._workload, self._model, self._device = workload, model, device
        self._optimizer = AdamW(model.parameters())
        self._tokens, self._targets = workload.batch(device)
        self._loss: Tensor | None = None

    def phases(self) -> Phases:
        """The named phases of the workload's mode, in order."""
        if self._workload.mode == "forward":
            return [("forward", self.infer)]
        both: Phases = [("forward", self.forward), ("backward", self.backward)]
        if self._workload.mode == "forward_backward":
            return both
        return [("zero_grad", self.zero_grad), *both, ("optimizer", self.update)]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def infer(self) -> None:
        with torch.no_grad(), self._workload.precision_context(self._device):
            self._model(self._tokens)

    def forward(self) -> None:
        with self._workload.precision_context(self._device):
            self._loss = cross_entropy(self._model(self._tokens), self._targets)

    def backward(self) -> None:
        assert self._loss is not None, "backward comes after forward"
        self._loss.backward()
        self._loss = None

    def update(self) -> None:
        self._optimizer.step()
