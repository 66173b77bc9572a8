"""The variants of data parallelism as arms of one comparison.

Arms take turns, so all of them exist at once, and ten copies of a model with optimizer state would
not fit anywhere. They share what may be shared: each arm has parameters of its own, for hooks hang
on parameters, but all point at the same weights; and one optimizer steps for everybody, with the
gradients of the arm whose turn it is. What an arm has for itself is what it differs in: where its
gradients lie and when they travel.

`alone` communicates nothing. What an arm takes longer than it, in the same round, is what its
communication costs after all overlap.

PyTorch's own is set up as ours are: gradients are views into its buckets, so that no second copy
exists, and buffers are sent once and not at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmlab.jobs.rank_work import RankWork
from lmlab.measure.clock import PhaseClock
from lmlab.parallel.ddp import DataParallel
from lmlab.parallel.ddp_flat import FlatDDP, NaiveDDP
from lmlab.parallel.ddp_overlapped import BucketedDDP, OverlappedDDP

ALONE = "alone"
TORCH = "torch_ddp"
STEP = "step"

# A gradient may be summed in another order, and no more than that.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class SharedOptimizer:
    """One AdamW for all arms, over the weights that they share."""

    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def step_with(self, gradients: Sequence[Tensor | None]) -> None:
        """One update with an arm's gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None


class Arm:
    """One variant with gradients of its own."""

    def __init__(
        self,
        name: str,
        work: RankWork,
        module: nn.Module,
        optimizer: SharedOptimizer,
        wrap: Callable[[nn.Module], nn.Module],
    ) -> None:
        self.name = name
        self._work = work
        self._optimizer = optimizer
        self._module = module
        self.wrapped = wrap(module)

    def backward(self) -> float:
        """Loss and averaged gradients of the present weights."""
        for parameter in self._module.parameters():
            parameter.grad = None
        loss = self._work.loss(self.wrapped)
        loss.backward()
        if isinstance(self.wrapped, DataParallel):
            self.wrapped.finish_gradient_synchronization()
        return float(loss.detach())

    def gradients(self) -> list[Tensor | None]:
        """As the last backward left them, in the module's order."""
        return [parameter.grad for parameter in self._module.parameters()]

    def step(self) -> None:
        """A whole train step. The loss is not read: that would stop the host."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._work.loss(self.wrapped).backward()
        if isinstance(self.wrapped, DataParallel):
            self.wrapped.finish_gradient_synchronization()
        self._optimizer.step_with(self.gradients())

    def timed(self, clock: PhaseClock) -> None:
        """A train step as one phase: an edge within it would wait for what should overlap."""
        with clock.phase(STEP):
            self.step()

    def timed_in_phases(self, clock: PhaseClock) -> None:
        """The same with the device idle between phases; for an arm that overlaps nothing."""
        for parameter in self._module.parameters():
            parameter.grad = None
        with clock.phase("forward"):
            loss = self._work.loss(self.wrapped)
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("optimizer"):
            self._optimizer.step_with(self.gradients())

    def messages(self) -> dict[str, int | None]:
        """How many messages a step sends and how large they are; PyTorch keeps its own counsel."""
        if not isinstance(self.wrapped, DataParallel):
            number = 0 if self.name == ALONE else None
            return {"messages": number, "message_bytes": number, "largest_message_bytes": number}
        sizes = [bucket.buffer.nbytes for bucket in self.wrapped.buckets]
        return {
            "messages": len(sizes),
            "message_bytes": sum(sizes),
            "largest_message_bytes": max(sizes),
        }


def wrappers(
    bucket_sizes_mb: Sequence[float], torch_bucket_mb: float
) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Every variant by name, in the order of the writeup."""
    return {
        ALONE: lambda module: module,
        "naive": NaiveDDP,
        "flat": FlatDDP,
        "overlapped": OverlappedDDP,
        **{bucketed(size): _bucketed(size) for size in bucket_sizes_mb},
        TORCH: lambda module: _torch(module, torch_bucket_mb),
    }


def bucketed(size_mb: float) -> str:
    """The name of the arm with buckets of that size."""
    return f"bucketed_{size_mb:g}"


def _bucketed(size_mb: float) -> Callable[[nn.Module], nn.Module]:
    return lambda module: BucketedDDP(module, size_mb)


def _torch(module: nn.Module, bucket_mb: float) -> nn.Module:
    known = signature(DistributedDataParallel).parameters
    # Torch 2.13 has a new name for the setting and warns at the old one; 2.11 knows only that.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"bucket_cap_mb": bucket_mb, buffers: False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **settings)


def twin(model: nn.Module) -> nn.Module:
    """The same model with parameters of its own that point at the same weights."""
    copy = deepcopy(model)
    for own, shared in zip(copy.parameters(), model.parameters(), strict=True):
        own.data = shared.data
    return copy


def mean_gradients(work: RankWork, model: nn.Module) -> tuple[float, list[Tensor]]:
    """What every arm should find: local gradients, averaged one by one by plain all-reduces."""
    module = twin(model)
    loss = work.loss(module)
    loss.backward()
    gradients = [_gradient(parameter) for parameter in module.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return float(loss.detach()), gradients


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def gradient_error(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> float:
    """Length of the difference over the length of what is expected, all parameters together."""
    off = norm = 0.0
    for gradient, reference in zip(found, expected, strict=True):
        difference = reference if gradient is None else gradient - reference
        off += float(difference.double().square().sum())
        norm += float(reference.double().square().sum())
    return (off / norm) ** 0.5 if norm else off**0.5


def describe_failure(error: float, tolerance: float) -> dict[str, Any]:
    """The entry of an arm whose gradients are not those of the others: no time for it."""
    return {
        "status": "failed",
        "reason": f"gradients are off by {error:.2g} of their length, allowed is {tolerance:g}",
    }
