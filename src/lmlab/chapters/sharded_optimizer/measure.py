"""Sharded optimizer: how much memory it saves per rank, and how much time it costs.

**Memory** is read at four stages of a first step and at the peak of a second, with the plain
optimizer, ours and PyTorch's ZeroRedundancyOptimizer, each built alone. All ranks use the same
tokens here, so gradients agree without communication, and the largest size that fits can be
measured however slow the link is. A variant whose weights after both steps differ from those of the
plain optimizer is not timed.

**Time** is measured in interleaved rounds of the same three, at the largest size whose step is
short enough. They share one model, one data-parallel wrapper and one AdamW state, so a job needs no
more memory than the plain optimizer. A barrier keeps earlier delays out of the optimizer's time.

Records, besides those of `autosize`, `memory_stages` and `rank_work`: `owned_bytes` (of the
parameters that each rank updates with our optimizer).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lmlab.jobs import memory_stages, rank_work
from lmlab.jobs.autosize import choose
from lmlab.jobs.memory_stages import Training
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import RankWork
from lmlab.measure import across_ranks
from lmlab.measure.clock import PhaseClock, synchronize
from lmlab.measure.precision import precision_named, tf32_allowed
from lmlab.measure.records import Record
from lmlab.parallel.ddp import BucketedDDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

PLAIN, OURS, TORCH = "replicated", "sharded", "torch_zero"
OPTIMIZERS: dict[str, Make] = {
    PLAIN: lambda parameters: torch.optim.AdamW(parameters),
    OURS: lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW),
    TORCH: lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW),
}
TOLERANCE = 1e-4
MEMORY_STEP_LIMIT_S = 15.0
"""Memory is worth a slow step: one suffices, and it does not depend on the link."""
GRADIENTS, OPTIMIZER = "gradients", "optimizer"


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, then time, of every optimizer on these ranks; called on every rank."""
    with tf32_allowed(precision_named(str(point.parameters["precision"])).tf32):
        memory, correct = measure_memory(point, device)
        times = measure_time(point, device, correct)
    return Outcome(measurements=[*times, *memory])


def measure_memory(point: Point, device: torch.device) -> tuple[list[Record], list[str]]:
    """Records of every optimizer at the largest size that fits, and which of them are correct."""
    workload, choice = choose(point, device, purpose="memory", limit_s=MEMORY_STEP_LIMIT_S)
    work = RankWork(workload, device, own_tokens=False)
    found = {name: two_steps_alone(make, work) for name, make in OPTIMIZERS.items()}
    records = [*choice, *memory_stages.expected_records(workload, device)]
    records += rank_work.per_rank("owned_bytes", found[OURS][0]["owned_bytes"], "B")
    correct = []
    for name, ranks in found.items():
        records += memory_stages.memory_records(name, ranks)
        expected = found[PLAIN][0]["digest"]
        errors = (rank_work.relative_error(own["digest"], expected) for own in ranks)
        error = across_ranks.max_error(errors)
        wrong = rank_work.why_wrong(name, "weights after two steps", error, TOLERANCE)
        records += wrong
        correct += [] if wrong else [name]
    return records, correct


def two_steps_alone(make: Make, work: RankWork) -> list[dict[str, Any]]:
    """One optimizer's first two steps on every rank, with a digest of the resulting weights."""
    rank_work.release(work.device)
    model = work.model()
    optimizer = make(model.parameters())
    own = {
        # The same tokens give the same gradients, so none are exchanged.
        **memory_stages.two_steps(Training(model, optimizer), work),
        "digest": weights_digest(model),
    }
    if isinstance(optimizer, ShardedOptimizer):
        own["owned_bytes"] = optimizer.ownership.bytes_by_rank
    del model, optimizer
    rank_work.release(work.device)
    return across_ranks.gather(own)


def weights_digest(model: nn.Module) -> list[float]:
    """Two norms of each parameter, which reveal a missed update without copying weights. Sums would
    not do: AdamW's first step moves every weight by the same amount, and where a gradient is almost
    zero, rounding decides the sign."""
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(p, order) for p in model.parameters() for order in (1, 2)]
        digest: list[float] = torch.stack(norms).double().tolist()
    return digest


def measure_time(point: Point, device: torch.device, names: list[str]) -> list[Record]:
    """Interleaved rounds of whole steps, at the largest size whose step is short enough."""
    bucket_mb = point.settings["bucket_mb"]

    def trial(work: RankWork) -> Callable[[], None]:
        model = BucketedDDP(work.model(), bucket_mb)
        step = step_with(OPTIMIZERS[OURS](model.module.parameters()), model, work)
        return lambda: step(PhaseClock(device))

    # In units of an all-reduce: one for the gradients, half for broadcasting the parameters.
    limit_s = point.settings["step_limit_s"]
    workload, choice = choose(
        point, device, purpose="time", limit_s=limit_s, messages=1.5, trial=trial
    )
    work = RankWork(workload, device)
    model = BucketedDDP(work.model(), bucket_mb)
    optimizers = {name: OPTIMIZERS[name](model.module.parameters()) for name in names}
    share_state(optimizers, model, work)
    steps = {name: step_with(optimizer, model, work) for name, optimizer in optimizers.items()}
    rounds = rank_work.take_turns(steps, point, device)
    records = rank_work.round_records(rounds, (OPTIMIZER, "total"))
    for name, step in steps.items():
        records += rank_work.device_time_record(name, partial(step, PhaseClock(device)), device)
    return [*records, *choice, *rank_work.work_records(work, model)]


def share_state(
    optimizers: Mapping[str, torch.optim.Optimizer], model: BucketedDDP, work: RankWork
) -> None:
    """Give every optimizer the plain one's state; a sharded one uses only the part it owns."""
    plain = optimizers[PLAIN]
    step_with(plain, model, work)(PhaseClock(work.device))  # creates the state
    for optimizer in optimizers.values():
        memory_stages.local_optimizer(optimizer).state.update(plain.state)


def step_with(
    optimizer: torch.optim.Optimizer, model: BucketedDDP, work: RankWork
) -> Callable[[PhaseClock], None]:
    """A training step with this optimizer."""

    def step(clock: PhaseClock) -> None:
        with clock.phase(GRADIENTS):
            model.zero_grad()
            work.loss(model).backward()
            model.finish_gradient_synchronization()
            synchronize(work.device)
            dist.barrier()
        with clock.phase(OPTIMIZER):
            optimizer.step()

    return step
