"""Data parallel: what averaging gradients costs per variant, and how much of it overlap hides.

All variants run in one job on the same ranks. The job chooses a size that the link can handle,
compares the gradients of every variant with plain averaging (a wrong variant is not timed), times
the variants in interleaved rounds, times the phases of a step without communication, because only
backward can hide messages, and finally profiles one step of each variant.

Variants share weights and optimizer state. Each has its own parameters, because hooks are attached
to parameters, but they alias the same storage. A variant's gradient buffers are allocated before
its step and freed after it, outside the timed region; PyTorch's DDP does not expose its buckets, so
it is wrapped anew for each step. So a job needs the memory of one variant, and the peak of a step
is that of its variant alone. What communication costs after overlap is a variant's time minus that
of `alone`, which does not communicate, in the same round.

Records, besides those of `autosize` and `rank_work`: `phase_time` per phase of a step without
communication; `gradient_error`, `messages`, `message_bytes` and `largest_message` per variant;
`peak_memory` of a step per variant and rank. `data.intervals_ms`: rank 0's timeline per variant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmlab.jobs import rank_work
from lmlab.jobs.autosize import choose
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import RankWork
from lmlab.measure.across_ranks import gather, max_error, max_over_ranks
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.precision import precision_named, tf32_allowed
from lmlab.measure.records import Record, timed, value
from lmlab.parallel.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlappedDDP
from lmlab.study.points import Point

ALONE = "alone"
TORCH = "torch_ddp"

# Gradients may differ only in the order of summation.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}

Wrap = Callable[[nn.Module], nn.Module]


def measure(point: Point, device: torch.device) -> Outcome:
    """Time every variant on these ranks; called on every rank."""
    with tf32_allowed(precision_named(str(point.parameters["precision"])).tf32):
        limit_s = point.settings["step_limit_s"]
        workload, choice = choose(point, device, purpose="time", limit_s=limit_s, trial=trial)
        work = RankWork(workload, device)
        model = work.model()
        variants = make_variants(point, work, model)
        checks = check(variants, work, model)
        correct = {n: variant for n, variant in variants.items() if checks[n]["status"] == "ok"}
        ready = {n: variant.ready for n, variant in correct.items()}
        steps = {n: rank_work.timed_step(each) for n, each in ready.items()}
        rounds = rank_work.take_turns(steps, point, device)
        peaks = [record for name, v in correct.items() for record in v.memory_records(name)]
        phases = rank_work.take_turns({ALONE: variants[ALONE].timed_in_phases}, point, device)
        overlap, intervals = rank_work.overlap_records(ready, device)
        records = [
            *rank_work.round_records(rounds),
            *(record for name, record in checks.items() if name != ALONE),
            *(
                timed(phases.slowest(ALONE, phase), "phase_time", phase=phase)
                for phase in phases.samples_ms[ALONE]
            ),
            *(record for name, v in variants.items() for record in v.message_records(name)),
            *peaks,
            *overlap,
            *choice,
            *rank_work.work_records(work, model),
        ]
    return Outcome(measurements=records, data={"intervals_ms": intervals})


def trial(work: RankWork) -> Callable[[], None]:
    """Forward, backward and one large message."""
    model = FlatDDP(work.model())

    def step() -> None:
        model.zero_grad()
        work.loss(model).backward()
        model.finish_gradient_synchronization()

    return step


def make_variants(point: Point, work: RankWork, model: nn.Module) -> dict[str, "Variant"]:
    """All variants around one set of weights, in the order of the report."""
    bucketed = {
        f"bucketed_{size:g}": partial(BucketedDDP, bucket_size_mb=size)
        for size in point.settings["bucket_sizes_mb"]
    }
    wraps: dict[str, Wrap] = {
        ALONE: lambda module: module,
        "naive": NaiveDDP,
        "flat": FlatDDP,
        "overlapped": OverlappedDDP,
        **bucketed,
        TORCH: partial(torch_ddp, bucket_mb=point.settings["torch_bucket_mb"]),
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return {name: Variant(work, model, optimizer, wrap) for name, wrap in wraps.items()}


def torch_ddp(module: nn.Module, bucket_mb: float) -> nn.Module:
    """PyTorch's DDP, configured like ours: gradients are views into its buckets, so there is only
    one copy, and module buffers are broadcast once, not in every step."""
    known = signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and warns about the old name; 2.11 knows only the old one.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"bucket_cap_mb": bucket_mb, buffers: False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **settings)


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
        self._wrapped: Any = wrap(self._module)
        buckets = self._wrapped.buckets if isinstance(self._wrapped, DataParallel) else ()
        self._buffers = [bucket.buffer for bucket in buckets]
        self._peak_bytes: int | None = None
        self._free()

    @contextmanager
    def allocated(self) -> Iterator[None]:
        """The variant's gradient buffers exist only inside the context."""
        if self._wrapped is None:
            self._wrapped = self._wrap(self._module)
            for _ in range(2):  # DDP rebuilds its buckets after the first
                self.backward()
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
            buffer.zero_()  # touch the pages before the clock starts
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        self._module.zero_grad()
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped = None
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    def backward(self) -> Tensor:
        """Compute averaged gradients; returns the loss unread, as reading it would synchronize."""
        self._module.zero_grad()
        loss = self._work.loss(self._wrapped)
        loss.backward()
        if isinstance(self._wrapped, DataParallel):
            self._wrapped.finish_gradient_synchronization()
        return loss.detach()

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the last backward, in parameter order."""
        return [parameter.grad for parameter in self._module.parameters()]

    @contextmanager
    def ready(self) -> Iterator[Callable[[], None]]:
        """Yield a training step, then record its peak memory."""
        with self.allocated():
            reset_peak_memory(self._work.device)
            yield self._step
            self._peak_bytes = peak_memory_bytes(self._work.device)

    def _step(self) -> None:
        self.backward()
        self._update()

    def _update(self) -> None:
        for parameter, gradient in zip(self._shared, self.gradients(), strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in self._shared:
            parameter.grad = None

    def timed_in_phases(self, clock: PhaseClock) -> None:
        """A step synchronized between phases, for the variant without communication."""
        self._module.zero_grad()
        with clock.phase("forward"):
            loss = self._work.loss(self._wrapped)
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("optimizer"):
            self._update()

    def memory_records(self, name: str) -> list[Record]:
        """Peak of the last step on every rank; all ranks must call this together."""
        peaks = gather(self._peak_bytes)
        return rank_work.per_rank("peak_memory", peaks, "B", variant=name, phase="total")

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


def share_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with its own parameters on the same storage."""
    return deepcopy(model, {id(p): nn.Parameter(p.data) for p in model.parameters()})


def check(variants: Mapping[str, Variant], work: RankWork, model: nn.Module) -> dict[str, Record]:
    """Per variant: its error against plain averaging on the worst rank, or a failed time."""
    expected_loss, expected = mean_gradients(work, model)
    allowed = TOLERANCE[work.workload.precision.name]
    found = {}
    for name, variant in variants.items():
        with variant.allocated():
            loss_error = rank_work.relative_error([float(variant.backward())], [expected_loss])
            own_error = 0.0 if name == ALONE else gradient_error(variant.gradients(), expected)
        error = max_over_ranks(max_error([loss_error, own_error]))
        correct = value("gradient_error", error, "", variant=name)
        (found[name],) = rank_work.why_wrong(name, "gradients", error, allowed) or [correct]
    return found


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
