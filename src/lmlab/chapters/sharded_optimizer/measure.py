"""Sharded optimizer: what a rank saves by remembering only its share, and what a step then takes.

Two questions, two halves of one job. **Memory** at four moments of a first step, for the plain
optimizer, ours and PyTorch's ZeroRedundancyOptimizer, each built by itself. Every rank takes the
same tokens there, so gradients agree without a message, and the largest size that fits is measured
however slow the link is. After its step each arm must hold the weights that the plain optimizer
has, or it gets no time. **Time** of the same three in rounds, at the largest size whose step stays
short: they share one model and one data-parallel wrapper, and a step is cut where the optimizer
begins, behind a barrier, so that its phase holds nobody's delay from before.

`data`: `memory`: `size`, `left_out`, `expected` (the cost model's bytes), `owned_bytes` (of
parameters, by rank, as ours deals them out), `arms`: `status`, `reason`, `ranks` (moments, peaks);
`time`: `choice`, `gradient_bytes`, `parameters_total`, `arms`: `ranks_ms` and `optimizer_ms`, each
a list a rank; `tf32`, `threads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lmlab.jobs.autosize import (
    LeftOut,
    bandwidth,
    choose,
    why_too_large,
    why_too_slow,
)
from lmlab.jobs.memory_stages import Training, expected_bytes, first_step
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import (
    Candidate,
    RankWork,
    candidates,
    parameter_bytes,
    release,
)
from lmlab.measure import across_ranks
from lmlab.measure.clock import PhaseClock, synchronize
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.rounds import Rounds, interleave
from lmlab.parallel.ddp_overlapped import BucketedDDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point

Parameters = Iterator[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]

PLAIN, OURS, TORCH = "replicated", "sharded", "torch_zero"
OPTIMIZERS: dict[str, Make] = {
    PLAIN: lambda parameters: torch.optim.AdamW(parameters),
    OURS: lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW),
    TORCH: lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW),
}
TOLERANCE = 1e-4
MEMORY_STEP_LIMIT_S = 15.0
"""Memory is worth a slow step: one is enough, and its size does not depend on the link."""
GRADIENTS, OPTIMIZER = "gradients", "optimizer"


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, then time, of every optimizer on these ranks; called on each of them."""
    sizes = candidates(point, device)
    with tf32_allowed(sizes[0].workload.precision.tf32):
        memory = measure_memory(sizes, device)
        sound = [name for name, arm in memory["arms"].items() if arm["status"] == "ok"]
        rounds, timing = measure_time(point, sizes, device, sound)
        data = {
            "memory": memory,
            "time": timing,
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "threads": torch.get_num_threads(),
        }
    return Outcome(measurements=measurements(rounds), data=data)


def measurements(rounds: Rounds) -> dict[str, Any]:
    """The optimizer's phase of every arm, and the whole step beside it."""
    return {
        **{name: rounds.slowest(name, OPTIMIZER) for name in rounds.samples_ms},
        **{f"{name}_step": rounds.slowest(name) for name in rounds.samples_ms},
    }


def measure_memory(sizes: list[Candidate], device: torch.device) -> dict[str, Any]:
    """The moments of every optimizer at the largest size that fits."""
    candidate, left_out = largest_that_fits(sizes, device)
    work = RankWork(candidate.workload, device, own_tokens=False)
    found = {name: moments_of(make, work) for name, make in OPTIMIZERS.items()}
    return {
        "size": candidate.size,
        "left_out": [vars(one) for one in left_out],
        "expected": expected_bytes(candidate.workload, device),
        "owned_bytes": found[OURS]["ranks"][0]["owned_bytes"],
        "arms": {name: judged(arm, found[PLAIN]) for name, arm in found.items()},
    }


def largest_that_fits(
    sizes: list[Candidate], device: torch.device
) -> tuple[Candidate, list[LeftOut]]:
    """The first size that has room and comes back from its step in time; else the last."""
    rate = bandwidth(device)
    left_out: list[LeftOut] = []
    for candidate in sizes[:-1]:
        reason = why_too_large(candidate, device, copies=1) or why_too_slow(
            candidate, rate, messages=1, limit_s=MEMORY_STEP_LIMIT_S
        )
        if reason is None:
            return candidate, left_out
        left_out.append(LeftOut(candidate.size, reason))
    return sizes[-1], left_out


def moments_of(make: Make, work: RankWork) -> dict[str, Any]:
    """One optimizer's first step on every rank, and a digest of the weights after it."""
    release(work.device)
    own = own_moments(make, work)
    release(work.device)
    return {"ranks": across_ranks.gather(own)}


def own_moments(make: Make, work: RankWork) -> dict[str, Any]:
    """The same on this rank; model and optimizer are gone when it returns."""
    model = work.model()
    optimizer = make(model.parameters())
    training = Training(
        model=model,
        optimizer=optimizer,
        finish=lambda: None,  # same tokens, same gradients
        state=lambda: state_of(optimizer),
    )
    owner = optimizer if isinstance(optimizer, ShardedOptimizer) else None
    return {
        **first_step(training, work),
        "owned_bytes": owner.ownership.bytes_by_rank if owner else None,
        "digest": weights_digest(model),
    }


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """What an optimizer remembers on this rank; PyTorch's keeps it in one that it wraps."""
    inner = getattr(optimizer, "optim", optimizer)
    return inner.state


def weights_digest(model: nn.Module) -> list[float]:
    """Two lengths of each parameter: a weight that missed its update shows, and nothing is copied.

    Not its sum: the first step of AdamW moves every weight by the same amount up or down, and where
    a gradient is next to zero the last bit decides which.
    """
    with torch.no_grad():
        numbers = [
            torch.linalg.vector_norm(p, order) for p in model.parameters() for order in (1, 2)
        ]
        digest: list[float] = torch.stack(numbers).double().tolist()
    return digest


def judged(arm: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Whether an arm's ranks hold the weights that the plain optimizer has."""
    off = across_ranks.max_error(
        abs(found - expected) / (expected or 1.0)
        for rank in arm["ranks"]
        for found, expected in zip(rank["digest"], plain["ranks"][0]["digest"], strict=True)
    )
    failed = off > TOLERANCE
    reason = f"weights after a step are off by {off:.2g}, allowed is {TOLERANCE:g}"
    kept = ("moments", "peaks_bytes", "loss")
    return {
        "status": "failed" if failed else "ok",
        "reason": reason if failed else None,
        "ranks": [{key: rank[key] for key in kept} for rank in arm["ranks"]],
    }


def measure_time(
    point: Point, sizes: list[Candidate], device: torch.device, names: list[str]
) -> tuple[Rounds, dict[str, Any]]:
    """Rounds of whole steps with every optimizer in turn, at the largest size that is quick."""
    bucket_mb = point.settings["bucket_mb"]
    choice = choose(
        sizes,
        device,
        limit_s=point.settings["step_limit_s"],
        copies=4,  # state of the sharded ones, and messages under way
        messages=1.5,  # gradients go both ways, parameters one
        try_step=lambda candidate: trial_s(candidate, device, bucket_mb),
    )
    work = RankWork(choice.candidate.workload, device)
    model = BucketedDDP(work.model(), bucket_mb)
    arms = {name: OPTIMIZERS[name](model.module.parameters()) for name in names}
    rounds = interleave(
        {name: step_with(optimizer, model, work) for name, optimizer in arms.items()},
        device=device,
        warmup=point.settings["warmup"],
        rounds=point.settings["rounds"],
        time_cap_s=point.settings["time_cap_s"],
    )
    return rounds, {
        "choice": choice.to_json(),
        "step_limit_s": point.settings["step_limit_s"],
        "parameters_total": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": parameter_bytes(model),
        "tokens_per_rank": work.workload.shape.tokens,
        "arms": {
            name: {
                "ranks_ms": rounds.samples_ms[name]["total"],
                "optimizer_ms": rounds.samples_ms[name][OPTIMIZER],
            }
            for name in names
        },
    }


def step_with(
    optimizer: torch.optim.Optimizer, model: BucketedDDP, work: RankWork
) -> Callable[[PhaseClock], None]:
    """A train step that ends in this optimizer."""

    def step(clock: PhaseClock) -> None:
        with clock.phase(GRADIENTS):
            for parameter in model.parameters():
                parameter.grad = None
            work.loss(model).backward()
            model.finish_gradient_synchronization()
            synchronize(work.device)
            dist.barrier()
        with clock.phase(OPTIMIZER):
            optimizer.step()

    return step


def trial_s(candidate: Candidate, device: torch.device, bucket_mb: float) -> float:
    """Seconds of a step with our sharded optimizer, the second time it runs."""
    work = RankWork(candidate.workload, device)
    model = BucketedDDP(work.model(), bucket_mb)
    step = step_with(OPTIMIZERS[OURS](model.module.parameters()), model, work)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        step(PhaseClock(device))
        synchronize(device)
        seconds = time.perf_counter() - began
    return seconds
