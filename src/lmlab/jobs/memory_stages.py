"""A rank's memory at four stages of its first train step.

    initialised      the model, its wrapper and its optimizer exist
    after_forward    plus what autograd saves for backward
    before_step      without that, plus gradients
    after_step       plus the optimizer's state

Each variant is built, taken through the step and torn down by itself, so that a reading includes
nothing of another. The first step counts, because an optimizer allocates its state in it. Peaks are
those of forward with backward, and of the optimizer's step, where the device counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.jobs.rank_work import RankWork, expected_memory
from lmlab.jobs.workload import Workload
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.rank_memory import Saved, gradients, optimizer_tensors, read_memory


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model in training: what a step needs, and where its memory is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]
    """Called between backward and the optimizer."""
    state: Callable[[], Mapping[Any, Any]]
    """The optimizer's state on this rank."""
    buffers: Callable[[], Iterable[Tensor]] = tuple
    """Memory reserved for gradients even when there are none."""

    def parts(self) -> dict[str, Iterable[Tensor]]:
        """Tensors by purpose."""
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
    """Memory of this rank at every stage of a first step, peaks, and its loss."""
    device = work.device
    moments = {"initialised": read_memory(device, training.parts())}
    reset_peak_memory(device)
    saved = Saved([*training.model.buffers(), work.tokens, work.targets])
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
    """The cost model's bytes of one unsharded rank; None for a model it does not describe."""
    expected = expected_memory(workload, device)
    if expected is None:
        return None
    return {
        "parameters": expected.parameters + expected.buffers,
        "gradients": expected.gradients,
        "optimizer_state": expected.optimizer_state,
        "activations": expected.activations + expected.autocast_weights,
    }
