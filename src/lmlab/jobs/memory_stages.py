"""Memory of every rank at four stages of its first training step.

    initialized      the model, its wrapper and its optimizer exist
    after_forward    plus activations, which autograd keeps for backward
    before_step      activations are freed, gradients exist
    after_step       plus the optimizer's state, created in its first step

Variants are built, stepped and torn down one at a time, so no reading includes another variant.
Peaks come from a second step, which starts with optimizer state like every later one: one peak for
forward and backward, one for the optimizer step. A CPU has no peak counter.

Records: `allocated` per variant, stage and rank; for the rank with the most allocated, `memory` per
category, `reserved` (held by the allocator) and `device_memory` (reported by the device, for the
`scope` it can distinguish: process or device); `peak_memory` per variant, phase and rank; `loss`
per variant, step and rank; `expected_memory` per category, by the cost model for an unsharded rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmlab.jobs.rank_work import RankWork, expected_memory, per_rank
from lmlab.jobs.workload import Workload
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.memory.accounting import (
    counting_saved,
    gradients,
    optimizer_tensors,
    read_memory,
)
from lmlab.measure.records import Record, by_label, value
from lmlab.measure.time_spent import measuring
from lmlab.parallel import FSDP
from lmlab.parallel.ddp import DataParallel


@dataclass(frozen=True)
class Training:
    """A model, possibly wrapped by a class from `lmlab.parallel`, and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def categories(self) -> dict[str, Iterable[Tensor]]:
        """Tensors grouped by purpose."""
        parameters = list(self.model.parameters())
        buckets = self.model.buckets if isinstance(self.model, DataParallel) else ()
        return {
            "parameters": [*parameters, *self.model.buffers()],
            "gradients": [*(bucket.buffer for bucket in buckets), *gradients(parameters)],
            "optimizer_state": optimizer_tensors(local_optimizer(self.optimizer).state),
        }

    def finish(self) -> None:
        """Wait for the wrapper's gradient synchronization, if it has one."""
        if isinstance(self.model, DataParallel | FSDP):
            self.model.finish_gradient_synchronization()

    def backward(self, work: RankWork) -> Tensor:
        """Run forward and backward; the loss stays a tensor, since reading it would synchronize."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = work.loss(self.model)
        loss.backward()
        self.finish()
        return loss.detach()

    def step(self, work: RankWork) -> Tensor:
        """Run one training step and return its loss."""
        loss = self.backward(work)
        self.optimizer.step()
        return loss


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's state: the one inside PyTorch's sharded optimizer, else
    the optimizer itself."""
    return getattr(optimizer, "optim", optimizer)


@measuring()
def two_steps(training: Training, work: RankWork) -> dict[str, Any]:
    """Memory of this rank at every stage of a first step, peaks of a second, and both losses."""
    device = work.device
    stages = {"initialized": read_memory(device, training.categories())}
    with counting_saved([*training.model.buffers(), work.tokens, work.targets]) as saved:
        loss = work.loss(training.model)
    kept = sum(saved.values())
    stages["after_forward"] = read_memory(device, training.categories(), activations=kept)
    losses = [float(loss.detach())]
    loss.backward()
    del loss
    training.finish()
    stages["before_step"] = read_memory(device, training.categories())
    training.optimizer.step()
    stages["after_step"] = read_memory(device, training.categories())
    reset_peak_memory(device)
    losses.append(float(training.backward(work)))
    peaks = {"forward_backward": peak_memory_bytes(device)}
    reset_peak_memory(device)
    training.optimizer.step()
    peaks["optimizer"] = peak_memory_bytes(device)
    return {"stages": stages, "peaks": peaks, "losses": losses}


def memory_records(variant: str, ranks: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of what `two_steps` returned on every rank."""
    records = []
    for phase in ranks[0]["peaks"]:
        peaks = (found["peaks"][phase] for found in ranks)
        records += per_rank("peak_memory", peaks, "B", variant=variant, phase=phase)
    for stage in ranks[0]["stages"]:
        labels: dict[str, Any] = {"variant": variant, "stage": stage}
        readings = [rank["stages"][stage] for rank in ranks]
        allocated = [reading["allocated_bytes"] for reading in readings]
        records += per_rank("allocated", allocated, "B", **labels)
        labels["rank"] = fullest = allocated.index(max(allocated))
        reading = readings[fullest]
        records += by_label("memory", "category", reading["parts_bytes"], **labels)
        if reading["reserved_bytes"] is not None:
            records.append(value("reserved", reading["reserved_bytes"], "B", **labels))
        scope = {**labels, "scope": reading["device_scope"]}
        records.append(value("device_memory", reading["device_bytes"], "B", **scope))
    for step, losses in enumerate(zip(*(found["losses"] for found in ranks), strict=True), 1):
        records += per_rank("loss", losses, "", variant=variant, step=step)
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
