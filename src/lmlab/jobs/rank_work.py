"""What one rank of a data-parallel job computes: a model, its own part of the batch, a loss.

All ranks start from the same seeded weights and draw their own tokens, so that their gradients
differ and averaging them has an effect. The optimizer is `torch.optim.AdamW` for all variants:
these chapters compare communication, and PyTorch's sharded variants take PyTorch's optimizers. The
other chapters use the library's own AdamW.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.workload import OWN_ATTENTION, Workload, workload_of
from lmlab.measure.clock import synchronize
from lmlab.measure.precision import why_unsupported
from lmlab.model import footprint
from lmlab.model.loss import cross_entropy
from lmlab.study.points import Point

# Far enough apart that no two ranks of neighbouring seeds draw the same tokens.
SEED_STRIDE = 10_007
OPTIMIZER = "torch.optim.AdamW"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A size that a point may be measured with."""

    size: str
    workload: Workload


def candidates(point: Point, device: torch.device) -> list[Candidate]:
    """The sizes of a point, in the study's order; `Unsupported` if the precision is."""
    if reason := why_unsupported(str(point.parameters["precision"]), device):
        raise Unsupported(reason)
    parameters = {**point.parameters, "mode": "train_step"}
    return [
        Candidate(
            size=shape["size"],
            workload=workload_of(Point(point.chapter, parameters, {**point.settings, **shape})),
        )
        for shape in point.settings["sizes"]
    ]


class RankWork:
    """A workload on this rank."""

    def __init__(
        self, workload: Workload, device: torch.device, *, own_tokens: bool = True
    ) -> None:
        self.workload = workload
        self.device = device
        seed = workload.seed + (SEED_STRIDE * (1 + dist.get_rank()) if own_tokens else 0)
        self.tokens, self.targets = replace(workload, seed=seed).batch(device)

    def model(self) -> nn.Module:
        """The model with its seeded weights, the same on every rank."""
        return self.workload.build(self.device)

    def loss(self, model: nn.Module) -> Tensor:
        """Loss on this rank's tokens."""
        with self.workload.precision_context(self.device):
            return cross_entropy(model(self.tokens), self.targets)

    def adamw(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of every variant that does not shard its state."""
        return torch.optim.AdamW(parameters)


def second_step_s(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step when it runs for the second time: a trial that chooses the size."""
    seconds = 0.0
    for _ in range(2):
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        seconds = time.perf_counter() - began
    return seconds


def release(device: torch.device) -> None:
    """Return freed memory to the allocator, and from there to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the weights, and of their gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def expected_memory(workload: Workload, device: torch.device) -> footprint.Footprint | None:
    """The cost model's memory of an unsharded train step; None for a model it does not describe."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return None
    return footprint.memory(
        workload.shape,
        workload.precision.name,  # type: ignore[arg-type]
        "train_step",
        device="cuda" if device.type == "cuda" else "cpu",
    )
