"""Which size of model a job is measured with: the largest that fits and keeps its step short.

Links differ by a factor of a thousand: eight gigabytes of gradients take tens of milliseconds over
NVLink and many seconds through host memory, so a study cannot name one size for all machines. It
names several, largest first, and a limit for the step. A size is ruled out by arithmetic where that
suffices (memory from the cost model, time from the gradient's bytes over a measured bandwidth),
else by a real step; the reason is recorded. All ranks decide on the same numbers: the least free
memory, the slowest step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lmlab.jobs.rank_work import Candidate, expected_memory, release
from lmlab.measure import together
from lmlab.measure.clock import synchronize
from lmlab.model import cost, footprint

GIB = 2**30
PROBE_BYTES = 32 * 2**20
PROBES = 3
USABLE = 0.9  # of the free memory: allocators round, libraries take their share


@dataclass(frozen=True)
class LeftOut:
    """A size that was not taken."""

    size: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The size taken and what led to it."""

    candidate: Candidate
    all_reduce_gb_per_s: float
    """Bytes of a tensor over the time of its all-reduce."""
    step_s: float | None
    """The trial step on the slowest rank."""
    over_limit: bool = False
    left_out: list[LeftOut] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.candidate.size,
            "all_reduce_gb_per_s": self.all_reduce_gb_per_s,
            "step_s": self.step_s,
            "over_limit": self.over_limit,
            "left_out": [asdict(one) for one in self.left_out],
        }


def choose(
    sizes: Sequence[Candidate],
    device: torch.device,
    *,
    limit_s: float,
    copies: float,
    messages: float,
    try_step: Callable[[Candidate], float],
) -> Choice:
    """The first size that fits and whose step stays under the limit; else the last.

    `copies` of the weights are held on top of what a train step needs; a step sends at least
    `messages` times the bytes of the gradient. `try_step` gives a step's seconds on this rank.
    """
    rate = bandwidth(device)
    left_out: list[LeftOut] = []
    for candidate in sizes:
        last = candidate is sizes[-1]
        reason = why_too_large(candidate, device, copies=copies)
        if reason is None and not last:
            reason = why_too_slow(candidate, rate, messages=messages, limit_s=limit_s)
        if reason is None:
            step_s = together.largest(try_step(candidate))
            release(device)
            if step_s <= limit_s or last:
                return Choice(
                    candidate=candidate,
                    all_reduce_gb_per_s=rate / 1e9,
                    step_s=step_s,
                    over_limit=step_s > limit_s,
                    left_out=left_out,
                )
            reason = f"a step takes {step_s:.3g} s, more than {limit_s:g} s"
        left_out.append(LeftOut(candidate.size, reason))
    raise MemoryError(f"no size fits: {left_out[-1].size} {left_out[-1].reason}")


def bandwidth(device: torch.device) -> float:
    """Bytes per second of an all-reduce between these ranks, the same number on all of them."""
    buffer = torch.ones(PROBE_BYTES // 4, device=device)
    seconds = []
    for _ in range(PROBES):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return PROBE_BYTES / together.largest(min(seconds))


def why_too_slow(
    candidate: Candidate, rate: float, *, messages: float, limit_s: float
) -> str | None:
    """A reason if sending the gradient alone takes longer than a step may."""
    if not candidate.workload.is_ours:
        return None  # the cost model does not know its parameters, so it is tried
    parameters = cost.parameter_count(candidate.workload.shape).total
    least_s = messages * footprint.FP32 * parameters / rate
    if least_s <= limit_s:
        return None
    return (
        f"its messages alone take about {least_s:.3g} s at {rate / 1e9:.3g} GB/s, "
        f"more than {limit_s:g} s"
    )


def why_too_large(candidate: Candidate, device: torch.device, *, copies: float) -> str | None:
    """A reason if the cost model puts the ranks of one device over its free memory."""
    needed = needed_bytes(candidate, device, copies=copies)
    if needed is None:
        return None
    sharing = together.ranks_on_one_device(device)
    free = together.smallest(free_bytes(device))
    if needed * sharing <= USABLE * free:
        return None
    who = f"{sharing} ranks on one device need" if sharing > 1 else "a rank needs"
    return f"{who} about {needed * sharing / GIB:.3g} GiB, {free / GIB:.3g} GiB are free"


def needed_bytes(candidate: Candidate, device: torch.device, *, copies: float) -> float | None:
    """A train step's peak and the copies on top of it; None where the cost model does not apply."""
    expected = expected_memory(candidate.workload, device)
    return None if expected is None else expected.peak + copies * expected.parameters


def free_bytes(device: torch.device) -> float:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
