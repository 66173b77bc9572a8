"""FSDP: what sharding parameters, gradients and optimizer state saves and costs.

Four variants: data parallelism with a plain optimizer, the same with a sharded optimizer, our FSDP,
and PyTorch's `fully_shard`. Each first runs two steps alone, with memory read at the stages of the
first. The losses of both must be those of data parallelism on every rank: the first shows that
forward uses the right weights, the second that gradients and update were right; a variant that is
wrong gets no time. Then the variants take turns: each is built for its turn, runs a step that
allocates its state, then the timed one, and is freed, so that a job needs the memory of one. After
that each gather of our FSDP is timed, and finally one step of each variant is profiled.

If `fully_shard` does not run on a backend or device, its error becomes the variant's reason and the
others go on. All ranks must agree on that; otherwise one would wait for another that has stopped.

Records, besides those of `autosize`, `memory_stages` and `rank_work`: `loss` per variant, step
and rank; `parameter_bytes`, `sharded_bytes` (of the parameters that FSDP shards); `gather_wait`:
the sum of all waits for weights in a step, per phase and rank. `data.waits_ms`: the median wait of
each block per phase, one number per rank. `data.intervals_ms`: rank 0's timeline per variant.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lmlab.chapters.rank_steps import no_time, quick_size, timed_step
from lmlab.jobs.memory_stages import Training, expected_records, first_step, memory_records
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import (
    RankWork,
    Ready,
    candidates,
    overlap_records,
    parameter_bytes,
    release,
    round_records,
    take_turns,
    work_records,
)
from lmlab.measure import across_ranks
from lmlab.measure.clock import synchronize
from lmlab.measure.device import is_out_of_memory
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, value
from lmlab.parallel.ddp import BucketedDDP
from lmlab.parallel.fsdp import FSDP, has_matrix_weight
from lmlab.parallel.fsdp_group import FSDPGroup
from lmlab.parallel.hooks import in_backward
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
WATCHED_STEPS = 3
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}

Build = Callable[[RankWork], Training]
Alone = Mapping[str, list[dict[str, Any]] | str]


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, time, waits and overlap of every variant; called on each rank."""
    sizes = candidates(point)
    builders = builders_of(point.settings["bucket_mb"])
    with tf32_allowed(sizes[0].workload.precision.tf32):
        # Two gathers and a scatter, each half of an all-reduce.
        choice = quick_size(
            point, sizes, device, lambda work: partial(ours(work).step, work), messages=1.5
        )
        work = RankWork(choice.candidate.workload, device)
        alone = {name: two_steps_alone(name, build, work) for name, build in builders.items()}
        checks, correct = check(alone, TOLERANCE[work.workload.precision.name])
        ready = {name: partial(warm_training, builders[name], work) for name in correct}
        rounds = take_turns({n: timed_step(each) for n, each in ready.items()}, point, device)
        waits = watch_gathers(ready[OURS], device) if OURS in ready else []
        overlap, intervals = overlap_records(ready, device)
        whole = work.model()
        records = [
            *round_records(rounds),
            *wait_records(waits),
            *overlap,
            *size_records(whole),
            *work_records(work, whole),
            *checks,
            *choice.records("memory and time"),
            *expected_records(work.workload, device),
        ]
    return Outcome(measurements=records, data={"waits_ms": waits, "intervals_ms": intervals})


def builders_of(bucket_mb: float) -> dict[str, Build]:
    """The variants by name; data parallelism uses buckets of this size."""

    def data_parallel(make_optimizer: Any, work: RankWork) -> Training:
        model = BucketedDDP(work.model(), bucket_mb)
        optimizer = make_optimizer(model.parameters())
        return Training(
            model=model,
            optimizer=optimizer,
            finish=model.finish_gradient_synchronization,
            state=lambda: optimizer.state,
            buffers=lambda: [bucket.buffer for bucket in model.buckets],
        )

    sharded = partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW)
    return {
        DDP: partial(data_parallel, torch.optim.AdamW),
        SHARDED: partial(data_parallel, sharded),
        OURS: lambda work: ours(work),
        TORCH: lambda work: torch_fully_shard(work),
    }


def ours(work: RankWork) -> Training:
    """Our FSDP."""
    model = FSDP(work.model())
    optimizer = work.adamw(model.parameters())
    return Training(
        model=model,
        optimizer=optimizer,
        finish=model.finish_gradient_synchronization,
        state=lambda: optimizer.state,
    )


def torch_fully_shard(work: RankWork) -> Training:
    """PyTorch's: the members of module lists, and the rest."""
    model = work.model()
    group = dist.group.WORLD
    assert group is not None, "a rank measures within a process group"
    mesh = DeviceMesh.from_group(group, work.device.type)
    for modules in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for block in modules:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = work.adamw(model.parameters())
    return Training(
        model=model, optimizer=optimizer, finish=lambda: None, state=lambda: optimizer.state
    )


def two_steps_alone(name: str, build: Build, work: RankWork) -> list[dict[str, Any]] | str:
    """Memory of the first and losses of both on every rank, or why it does not run here."""
    release(work.device)
    own: dict[str, Any] = {}
    reason = None
    try:
        own = _two_steps(build(work), work)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if name != TORCH or is_out_of_memory(error):
            raise  # ours must run everywhere: an error fails the whole point
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reasons = [each for each in across_ranks.gather(reason) if each]
    release(work.device)
    return reasons[0] if reasons else across_ranks.gather(own)


def _two_steps(training: Training, work: RankWork) -> dict[str, Any]:
    first = first_step(training, work)
    return {**first, "losses": [first["loss"], float(training.step(work))]}


def check(alone: Alone, allowed: float) -> tuple[list[Record], list[str]]:
    """Memory and losses, or reasons; and which variants have the losses of data parallelism."""
    records: list[Record] = []
    correct = []
    for name, ranks in alone.items():
        if isinstance(ranks, str):
            records.append(no_time(name, "unsupported", ranks))
            continue
        records += memory_records(name, ranks)
        records += [
            value("loss", loss, "", variant=name, step=step, rank=rank)
            for rank, own in enumerate(ranks)
            for step, loss in enumerate(own["losses"], 1)
        ]
        error = loss_error(ranks, alone[DDP])
        if error <= allowed:
            correct.append(name)
        else:
            reason = f"losses of two steps are off by {error:.2g}, {allowed:g} is allowed"
            records.append(no_time(name, "failed", reason))
    return records, correct


def loss_error(ranks: Any, baseline: Any) -> float:
    """The largest relative difference of a loss on any rank."""
    return across_ranks.max_error(
        abs(found - expected) / abs(expected)
        for own, base in zip(ranks, baseline, strict=True)
        for found, expected in zip(own["losses"], base["losses"], strict=True)
    )


@dataclass
class GatherWatch:
    """How long each block waits for its weights, by phase and in the order in which blocks ask.

    A block is what is gathered in one message; a gather that ends before its block needs the
    weights costs nothing. The wait is in `FSDPGroup.finish_gather`, where the first layer of the
    block asks for them. On a GPU two CUDA events around the call, on the compute stream, cover a
    waiting host, a waiting stream, and the copy of each matrix out of the message; on a CPU it is
    the host's clock. The block that ends forward and begins backward keeps its weights.
    """

    device: torch.device
    waits_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every wait inside the context."""
        original = FSDPGroup.finish_gather
        waits: list[tuple[tuple[str, str], Any, Any]] = []

        def timed(group: FSDPGroup) -> None:
            key = ("backward" if in_backward() else "forward", group.name)
            before = self._now()
            original(group)
            waits.append((key, before, self._now()))

        with patch.object(FSDPGroup, "finish_gather", timed):
            yield
        synchronize(self.device)  # events can be read once the device has passed them
        on_gpu = self.device.type == "cuda"
        for key, before, after in waits:
            waited = before.elapsed_time(after) if on_gpu else (after - before) * 1e3
            self.waits_ms.setdefault(key, []).append(waited)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def medians(self) -> dict[tuple[str, str], float]:
        """The median wait by phase and block."""
        return {key: statistics.median(waits) for key, waits in self.waits_ms.items()}


@contextmanager
def warm_training(build: Build, work: RankWork) -> Iterator[Callable[[], Tensor]]:
    """The step of a variant that has taken its first one; the variant exists only inside."""
    release(work.device)
    training = build(work)
    training.step(work)
    yield partial(training.step, work)


def watch_gathers(ready: Ready, device: torch.device) -> list[dict[str, Any]]:
    """How long each block waits for its weights, on every rank."""
    watch = GatherWatch(device)
    with ready() as step:
        for _ in range(WATCHED_STEPS):
            dist.barrier()
            with watch.watching():
                step()
    ranks = across_ranks.gather(watch.medians())
    return [
        {"phase": phase, "layer": layer, "ms": [round(own[phase, layer], 6) for own in ranks]}
        for phase, layer in ranks[0]
    ]


def wait_records(waits: list[dict[str, Any]]) -> list[Record]:
    """All waits of a step together, per phase and rank."""
    totals: dict[tuple[str, int], float] = defaultdict(float)
    for row in waits:
        for rank, ms in enumerate(row["ms"]):
            totals[row["phase"], rank] += ms
    return [
        value("gather_wait", total, "ms", phase=phase, rank=rank)
        for (phase, rank), total in totals.items()
    ]


def size_records(whole: nn.Module) -> list[Record]:
    """How large the model is, and how much of it FSDP shards."""
    sharded = {
        parameter
        for layer in whole.modules()
        if has_matrix_weight(layer)
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim > 1
    }
    return [
        value("parameter_bytes", parameter_bytes(whole), "B"),
        value("sharded_bytes", sum(parameter.nbytes for parameter in sharded), "B"),
    ]
