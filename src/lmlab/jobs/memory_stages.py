"""Memory of every rank at four stages of its first training step.

    initialized      the model, its wrapper and its optimizer exist
    after_forward    plus activations, which autograd keeps for backward
    before_step      activations are freed, gradients exist
    after_step       plus the optimizer's state, created in its first step

Each variant is built, stepped and torn down alone, so that a reading contains nothing of another.
Peaks are those of forward with backward, and of the optimizer step; a CPU has no such counter.

Records: `allocated` per variant, stage and rank; of the rank that has allocated most, `memory` per
category, `reserved` (held by the allocator) and `device_memory` (as the device reports it, for the
`scope` it can distinguish: process or device); `peak_memory` per variant, phase and rank;
`expected_memory` per category, by the cost model for an unsharded rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.jobs.rank_work import RankWork, expected_memory
from lmlab.jobs.workload import Workload
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.memory.accounting import (
    SavedActivations,
    gradients,
    optimizer_tensors,
    read_memory,
)
from lmlab.measure.records import Record, by_label, value


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model in training: what a step needs, and where its memory is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]  # called between backward and the optimizer
    state: Callable[[], Mapping[Any, Any]]  # the optimizer's state on this rank
    buffers: Callable[[], Iterable[Tensor]] = tuple  # reserved for gradients

    def categories(self) -> dict[str, Iterable[Tensor]]:
        """Tensors by what they are for."""
        parameters = list(self.model.parameters())
        return {
            "parameters": [*parameters, *self.model.buffers()],
            "gradients": [*self.buffers(), *gradients(parameters)],
            "optimizer_state": optimizer_tensors(self.state()),
        }

    def step(self, work: RankWork) -> Tensor:
        """One training step; its loss, which is not read: that would wait for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = work.loss(self.model)
        loss.backward()
        self.finish()
        self.optimizer.step()
        return loss.detach()


def first_step(training: Training, work: RankWork) -> dict[str, Any]:
    """Memory of this rank at every stage of a first step, its peaks, and its loss."""
    device = work.device
    stages = {"initialized": read_memory(device, training.categories())}
    reset_peak_memory(device)
    saved = SavedActivations([*training.model.buffers(), work.tokens, work.targets])
    with saved.counting():
        loss = work.loss(training.model)
    stages["after_forward"] = read_memory(device, training.categories(), activations=saved.nbytes)
    loss_value = float(loss.detach())
    loss.backward()
    del loss
    training.finish()
    stages["before_step"] = read_memory(device, training.categories())
    peaks = {"forward_backward": peak_memory_bytes(device)}
    reset_peak_memory(device)
    training.optimizer.step()
    stages["after_step"] = read_memory(device, training.categories())
    peaks["optimizer"] = peak_memory_bytes(device)
    return {"stages": stages, "peaks": peaks, "loss": loss_value}


def memory_records(variant: str, ranks: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of what `first_step` returned on every rank."""
    records = [
        value("peak_memory", peak, "B", variant=variant, phase=phase, rank=rank)
        for rank, found in enumerate(ranks)
        for phase, peak in found["peaks"].items()
        if peak is not None
    ]
    for stage in ranks[0]["stages"]:
        labels: dict[str, Any] = {"variant": variant, "stage": stage}
        readings = [rank["stages"][stage] for rank in ranks]
        allocated = {rank: reading["allocated_bytes"] for rank, reading in enumerate(readings)}
        records += [
            value("allocated", n, "B", **labels, rank=rank) for rank, n in allocated.items()
        ]
        labels["rank"] = fullest = max(allocated, key=allocated.__getitem__)
        reading = readings[fullest]
        records += by_label("memory", "category", reading["parts_bytes"], **labels)
        if reading["reserved_bytes"] is not None:
            records.append(value("reserved", reading["reserved_bytes"], "B", **labels))
        scope = {**labels, "scope": reading["device_scope"]}
        records.append(value("device_memory", reading["device_bytes"], "B", **scope))
    return records


def expected_records(workload: Workload, device: torch.device) -> list[Record]:
    """The cost model's memory of one unsharded rank; none for a model that it does not know."""
    expected = expected_memory(workload, device)
    if expected is None:
        return []
    categories = {
        "parameters": expected.parameters + expected.buffers,
        "gradients": expected.gradients,
        "optimizer_state": expected.optimizer_state,
        "activations": expected.activations + expected.autocast_weights,
    }
    return by_label("expected_memory", "category", categories)
