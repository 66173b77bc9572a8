"""A rank's memory at four moments of its first train step.

    initialised      the model, its wrapper and its optimizer exist
    after_forward    what autograd keeps for backward is added
    before_step      that is gone, gradients are there
    after_step       the optimizer has made its state

Each arm is built, taken through the step and torn down by itself, so that a reading holds nothing
of another arm. The first step is the one that counts: an optimizer makes its state in it, and so it
shows what the state costs. Peaks are those of forward with backward, and of the optimizer's step,
where the device counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.jobs.rank_work import RankWork
from lmlab.jobs.workload import OWN_ATTENTION, Workload
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.rank_memory import SavedActivations, gradients, optimizer_tensors, read_memory
from lmlab.model import footprint


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model in training: what a step needs, and where its memory lies."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]
    """Called between backward and the optimizer."""
    state: Callable[[], Mapping[Any, Any]]
    """What the optimizer remembers on this rank."""
    buffers: Callable[[], Iterable[Tensor]] = tuple
    """Memory that is there for gradients even when there are none."""

    def parts(self) -> dict[str, Iterable[Tensor]]:
        """Tensors by what they are for."""
        parameters = list(self.model.parameters())
        return {
            "parameters": [*parameters, *self.model.buffers()],
            "gradients": [*self.buffers(), *gradients(parameters)],
            "optimizer_state": optimizer_tensors(self.state()),
        }

    def step(self, work: RankWork) -> float:
        """One train step; its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = work.loss(self.model)
        loss.backward()
        self.finish()
        self.optimizer.step()
        return float(loss.detach())


def first_step(training: Training, work: RankWork) -> dict[str, Any]:
    """Memory of this rank at every moment of a first step, peaks, and its loss."""
    device = work.device
    moments = {"initialised": read_memory(device, training.parts())}
    reset_peak_memory(device)
    saved = SavedActivations([*training.model.buffers(), work.tokens, work.targets])
    with saved.counting():
        loss = work.loss(training.model)
    moments["after_forward"] = read_memory(device, training.parts(), activations=saved.nbytes)
    value = float(loss.detach())
    loss.backward()
    del loss
    training.finish()
    moments["before_step"] = read_memory(device, training.parts())
    peaks = {"forward_backward": peak_memory_bytes(device)}
    reset_peak_memory(device)
    training.optimizer.step()
    moments["after_step"] = read_memory(device, training.parts())
    peaks["optimizer"] = peak_memory_bytes(device)
    return {"moments": moments, "peaks_bytes": peaks, "loss": value}


def expected_bytes(workload: Workload, device: torch.device) -> dict[str, int] | None:
    """What the cost model says of one unsharded rank; None for a model that it does not know."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return None
    expected = footprint.memory(
        workload.shape,
        workload.precision.name,  # type: ignore[arg-type]
        "train_step",
        device="cuda" if device.type == "cuda" else "cpu",
    )
    return {
        "parameters": expected.parameters + expected.buffers,
        "gradients": expected.gradients,
        "optimizer_state": expected.optimizer_state,
        "activations": expected.activations + expected.autocast_weights,
    }
