"""The data-parallel variants of one comparison, and the check of their gradients.

Variants take turns. They share weights and optimizer state: each has its own parameters, because
hooks are attached to parameters, but all use the same storage, and one optimizer steps with the
gradients of whichever variant runs. What a variant adds, its gradient buffers, is allocated before
its step and freed after it, outside the clock. PyTorch's DDP does not expose its buckets: it is
wrapped anew for each step, and settles the order of its buckets before the clock starts. So a job
needs the memory of one variant, and the peak of a step is that of its variant alone.

`alone` does not communicate. The time by which a variant exceeds it in the same round is the cost
of communication after all overlap. PyTorch's DDP is configured like ours: gradients are views into
its buckets, so that they exist once, and buffers are sent once and not in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmlab.jobs.rank_work import RankWork
from lmlab.measure.across_ranks import gather
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.records import Record, value
from lmlab.parallel.ddp import DataParallel
from lmlab.parallel.ddp_flat import FlatDDP, NaiveDDP
from lmlab.parallel.ddp_overlapped import BucketedDDP, OverlappedDDP

ALONE = "alone"
TORCH = "torch_ddp"
STEP = "step"

# The only difference allowed is the order of summation.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}

Wrap = Callable[[nn.Module], nn.Module]


class Variant:
    """One variant with its own gradients."""

    def __init__(
        self, work: RankWork, model: nn.Module, optimizer: torch.optim.Optimizer, wrap: Wrap
    ) -> None:
        self._work = work
        self._shared = list(model.parameters())
        self._optimizer = optimizer
        self._module = share_weights(model)
        self._wrap = wrap
        wrapped = wrap(self._module)
        self._wrapped: nn.Module | None = wrapped
        buckets = wrapped.buckets if isinstance(wrapped, DataParallel) else []
        self._buffers = [bucket.buffer for bucket in buckets]
        self._peak_bytes: int | None = None
        self._free()

    @contextmanager
    def allocated(self) -> Iterator[None]:
        """The variant's gradient buffers exist only inside the context."""
        if self._wrapped is None:
            self._wrapped = self._wrap(self._module)
            for _ in range(2):  # it orders its buckets after the first
                self.backward()
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
            buffer.zero_()  # touch the pages now, not while a clock runs
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        self._drop_gradients()
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped = None
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    def _drop_gradients(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def backward(self) -> Tensor:
        """Loss, and averaged gradients. The loss is not read: that would wait for the device."""
        self._drop_gradients()
        loss = self._loss()
        loss.backward()
        if isinstance(self._wrapped, DataParallel):
            self._wrapped.finish_gradient_synchronization()
        return loss.detach()

    def _loss(self) -> Tensor:
        assert self._wrapped is not None, "only while the variant is allocated"
        return self._work.loss(self._wrapped)

    def gradients(self) -> list[Tensor | None]:
        """As the last backward left them, in the module's order."""
        return [parameter.grad for parameter in self._module.parameters()]

    @contextmanager
    def ready(self) -> Iterator[Callable[[], None]]:
        """A training step without a clock."""
        with self.allocated():
            yield self._step

    def _step(self) -> None:
        self.backward()
        self._update()

    def _update(self) -> None:
        """One step of the shared optimizer with this variant's gradients."""
        for parameter, gradient in zip(self._shared, self.gradients(), strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in self._shared:
            parameter.grad = None

    def timed(self, clock: PhaseClock) -> None:
        """A training step as one phase: synchronizing within it would prevent overlap."""
        device = self._work.device
        with self.allocated():
            dist.barrier()  # PyTorch's DDP has just been built
            reset_peak_memory(device)
            with clock.phase(STEP):
                self._step()
            self._peak_bytes = peak_memory_bytes(device)

    def timed_in_phases(self, clock: PhaseClock) -> None:
        """The same, synchronized between phases; for the variant that overlaps nothing."""
        self._drop_gradients()
        with clock.phase("forward"):
            loss = self._loss()
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("optimizer"):
            self._update()

    def memory_records(self, name: str) -> list[Record]:
        """Peak of the last timed step on every rank; all ranks must call this together."""
        return [
            value("peak_memory", peak, "B", variant=name, phase="total", rank=rank)
            for rank, peak in enumerate(gather(self._peak_bytes))
            if peak is not None
        ]

    def message_records(self, name: str) -> list[Record]:
        """Number and size of the messages of a step; PyTorch's DDP does not report them."""
        if name == TORCH:
            return []
        sizes = [buffer.nbytes for buffer in self._buffers]
        return [
            value("messages", len(sizes), "", variant=name),
            value("message_bytes", sum(sizes), "B", variant=name),
            value("largest_message", max(sizes, default=0), "B", variant=name),
        ]


def wrappers(bucket_sizes_mb: Sequence[float], torch_bucket_mb: float) -> dict[str, Wrap]:
    """Every variant by name, in the order of the report."""
    return {
        ALONE: lambda module: module,
        "naive": NaiveDDP,
        "flat": FlatDDP,
        "overlapped": OverlappedDDP,
        **{f"bucketed_{size:g}": _bucketed(size) for size in bucket_sizes_mb},
        TORCH: lambda module: _torch(module, torch_bucket_mb),
    }


def _bucketed(size_mb: float) -> Wrap:
    return lambda module: BucketedDDP(module, size_mb)


def _torch(module: nn.Module, bucket_mb: float) -> nn.Module:
    known = signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and warns about the old name; 2.11 knows only the old one.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"bucket_cap_mb": bucket_mb, buffers: False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **settings)


def share_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with its own parameters on the same storage."""
    return deepcopy(model, {id(p): nn.Parameter(p.data) for p in model.parameters()})


def mean_gradients(work: RankWork, model: nn.Module) -> tuple[float, list[Tensor]]:
    """The reference: local gradients, averaged one by one with plain all-reduces."""
    module = share_weights(model)
    loss = work.loss(module)
    loss.backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in module.parameters()
    ]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return float(loss.detach()), gradients


def gradient_error(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the reference, all parameters together."""
    off = norm = 0.0
    for gradient, reference in zip(found, expected, strict=True):
        difference = reference if gradient is None else gradient - reference
        off += float(difference.double().square().sum())
        norm += float(reference.double().square().sum())
    return (off / norm) ** 0.5 if norm else off**0.5
