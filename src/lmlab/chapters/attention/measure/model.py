"""A training step of the model with one attention and with another: its time and peak memory.

Records: see `shared_model`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.chapters.attention.measure.shared_model import Forward, SharedStep, Switch, compare
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import workload_of
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.model.transformer import CausalSelfAttention
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the variants inside one model."""
    names = point.settings["variants"]
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        switch = Switch(model, {name: with_attention(model, name) for name in names})
        step = SharedStep(workload, switch, device)
        needs = dict(zip(names, names, strict=True))
        return compare(step, Variants(names, device), point.settings, needs=needs)


def with_attention(model: nn.Module, name: str) -> Forward:
    """The model with this attention in all its layers, set at every call."""

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
