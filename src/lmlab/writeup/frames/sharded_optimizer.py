"""Memory at the moments of a step and times of the optimizer, arm by arm.

What differs from stage 1 of ZeRO is arithmetic on the measured model, so it is done here. Per rank
and step, of N ranks, in bytes sent: a ring's all-reduce of G bytes of gradients is 2 (N-1)/N G, its
reduce-scatter half of that; sending each of P bytes of parameters from its owner to all is (N-1)/N
P on average, like an all-gather. Stage 1 as it was published reduces each gradient only to the rank
that needs it; here gradients are averaged everywhere first, so that any data parallelism can stand
below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmlab.writeup.frames.rank_jobs import Job, slowest
from lmlab.writeup.paired import RatioInterval, ratio_interval

PLAIN, OURS, TORCH = "replicated", "sharded", "torch_zero"
LABELS = {
    PLAIN: "AdamW on every rank",
    OURS: "sharded optimizer",
    TORCH: "PyTorch ZeroRedundancyOptimizer",
}

WITH = {
    PLAIN: "AdamW on every rank",
    OURS: "the sharded optimizer",
    TORCH: "PyTorch's ZeroRedundancyOptimizer",
}


def memory_arms(job: Job) -> Mapping[str, Mapping[str, Any]]:
    """The arms whose memory was read, by name."""
    arms: Mapping[str, Mapping[str, Any]] = job.data["memory"]["arms"]
    return arms


def state_bytes(arm: Mapping[str, Any]) -> list[int]:
    """Optimizer state after the step, rank by rank."""
    return [
        int(rank["moments"]["after_step"]["parts_bytes"]["optimizer_state"])
        for rank in arm["ranks"]
    ]


def optimizer_ms(job: Job, arm: str) -> list[float] | None:
    """The optimizer's phase on the slowest rank, round by round."""
    arms = job.data["time"]["arms"]
    return slowest(arms[arm]["optimizer_ms"]) if arm in arms else None


def step_ms(job: Job, arm: str) -> list[float] | None:
    """The whole step."""
    arms = job.data["time"]["arms"]
    return slowest(arms[arm]["ranks_ms"]) if arm in arms else None


def against(job: Job, base: str) -> RatioInterval | None:
    """Our optimizer's phase over that of another, round by round."""
    ours, theirs = optimizer_ms(job, OURS), optimizer_ms(job, base)
    return None if ours is None or theirs is None else ratio_interval(ours, theirs)


def steps_against(job: Job, base: str) -> RatioInterval | None:
    """Our whole step over that with another optimizer, round by round."""
    ours, theirs = step_ms(job, OURS), step_ms(job, base)
    return None if ours is None or theirs is None else ratio_interval(ours, theirs)


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Bytes that a rank keeps and sends, by how the optimizer is sharded."""

    state_share: float
    """What ours keeps on the fullest rank, of the whole state."""
    even_share: float
    """What a cut through the middle of tensors would keep: one over the number of ranks."""
    plain: float
    ours: float
    zero: float


def volumes(job: Job) -> Volumes:
    """For the model whose memory was measured."""
    owned = [int(count) for count in job.data["memory"]["owned_bytes"]]
    total, ranks = sum(owned), len(owned)
    share = (ranks - 1) / ranks
    return Volumes(
        state_share=max(owned) / total,
        even_share=1 / ranks,
        plain=2 * share * total,
        ours=3 * share * total,
        zero=2 * share * total,
    )
