"""The rungs of the ladder: each changes one thing about the training step below it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmlab.chapters.attention.measure.variants import refuse_unsupported
from lmlab.chapters.principles.measure.programs import INTERPRETED
from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.preflight import refuse_slow_type
from lmlab.measure.precision import precision_named, why_unsupported
from lmlab.model.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Rung:
    """How a training step is computed."""

    name: str = "fp32"
    precision: str = "fp32"
    attention: str = "naive"
    fused_adamw: bool = False
    fused_loss: bool = False
    compiled: bool = False
    """torch.compile over each block; all blocks share one compilation."""
    narrow: bool = False
    """Weights and gradients in bf16, fp32 masters in the optimizer, instead of autocast."""
    graph: bool = False
    """Forward and backward replayed as a CUDA graph."""
    copies: int = 1
    """The batch, repeated: same loss and gradients, more work."""
    checkpoint: str = "none"

    def labels(self, batch: int) -> dict[str, Any]:
        """Labels that identify its records."""
        return {
            "rung": self.name,
            "precision": self.precision,
            "attention": self.attention,
            "batch_size": batch * self.copies,
            "checkpoint": self.checkpoint,
        }


CHANGES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "attention": {},  # set to the first of the study's attentions
    "adamw": {"fused_adamw": True},
    "loss": {"fused_loss": True},
    "compile": {"compiled": True},
    "masters": {"narrow": True},
    "graph": {"graph": True},
}
"""What a rung changes; `batch` and `checkpoint` come after a search."""


def next_rung(below: Rung, name: str, attention: str) -> Rung:
    """The named rung, on top of the one below."""
    change = {"attention": attention} if name == "attention" else CHANGES[name]
    return replace(below, name=name, **change)


def shape_of(asked: Mapping[str, Any], **changed: int) -> ModelShape:
    """The model that a point asks for."""
    keys = ModelShape.__dataclass_fields__.keys() - changed
    return ModelShape(**{key: asked[key] for key in keys}, **changed)


def refuse(rung: Rung, asked: Mapping[str, Any], device: torch.device) -> None:
    """Raise `Unsupported` if the rung is not measured on this device."""
    if reason := why_unsupported(rung.precision, device):
        raise Unsupported(reason)
    head_dim = asked["d_model"] // asked["num_heads"]
    refuse_unsupported(rung.attention, device, precision_named(rung.precision).dtype, head_dim)
    if device.type == "cuda":
        return
    if rung.fused_adamw or rung.fused_loss or rung.narrow:
        raise Unsupported(INTERPRETED)
    if rung.graph:
        raise Unsupported("CUDA graphs need a CUDA GPU")
    refuse_slow_type({**asked, "precision": rung.precision})


def refuse_without_bf16(device: torch.device, on_cpu: str) -> None:
    """Raise `Unsupported` on a CPU, and on a GPU that has no bf16."""
    if reason := on_cpu if device.type != "cuda" else why_unsupported("bf16", device):
        raise Unsupported(reason)
