"""Chooses the model size a job is measured with: the largest that fits and keeps its step short.

Links differ by a factor of a thousand: eight gigabytes of gradients take tens of milliseconds
between GPUs with NVLink and many seconds between processes that communicate through the host. So a
study names several sizes, largest first, and a limit for the step. Where arithmetic suffices, a
size is left out before anything is built: memory by the cost model, time by the bytes of its
gradient over a bandwidth that is measured first. Otherwise a real step is tried. The reason why a
larger size was left out is recorded.

All ranks decide on the same numbers: the least free memory, the slowest step.

Records: `size` with a `purpose`, and without a value for each `candidate` that was left out;
`all_reduce_bandwidth` (tensor bytes over time), `trial_step`, `over_limit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist

from lmlab.jobs.rank_work import Candidate, expected_memory, release
from lmlab.measure import across_ranks
from lmlab.measure.clock import synchronize
from lmlab.measure.records import Record, value, without_value
from lmlab.model import cost, footprint

GIB = 2**30
PROBE_BYTES = 32 * 2**20
PROBES = 3
USABLE = 0.9  # of free memory: allocators round up, and libraries need some


@dataclass(frozen=True)
class LeftOut:
    """A size that was not chosen."""

    size: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen size and the reasons for it."""

    candidate: Candidate
    all_reduce_gb_per_s: float
    """Bytes of a tensor over the time its all-reduce takes."""
    step_s: float | None = None
    """The trial step on the slowest rank; None if none was tried."""
    over_limit: bool = False
    left_out: list[LeftOut] = field(default_factory=list)

    def records(self, purpose: str) -> list[Record]:
        """Records of the choice, its purpose, and the sizes left out."""
        chosen = [value("size", self.candidate.size, "", purpose=purpose)]
        chosen += [
            without_value("size", "unsupported", one.reason, purpose=purpose, candidate=one.size)
            for one in self.left_out
        ]
        chosen.append(
            value("all_reduce_bandwidth", self.all_reduce_gb_per_s, "GB/s", purpose=purpose)
        )
        if self.step_s is not None:
            chosen.append(value("trial_step", self.step_s * 1e3, "ms", purpose=purpose))
        return [*chosen, value("over_limit", self.over_limit, "", purpose=purpose)]


def choose(
    sizes: Sequence[Candidate],
    device: torch.device,
    *,
    limit_s: float,
    messages: float,
    try_step: Callable[[Candidate], float],
) -> Choice:
    """The first size that fits and whose step stays under the limit; else the last.

    A step sends at least `messages` times the bytes of the gradient. `try_step` returns a step's
    seconds on this rank.
    """
    rate = bandwidth(device)
    left_out: list[LeftOut] = []
    for candidate in sizes:
        last = candidate is sizes[-1]
        reason = why_too_large(candidate, device)
        if reason is None and not last:
            reason = why_too_slow(candidate, rate, messages=messages, limit_s=limit_s)
        if reason is None:
            step_s = across_ranks.max_over_ranks(try_step(candidate))
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


def largest_that_fits(
    sizes: Sequence[Candidate], device: torch.device, *, limit_s: float
) -> Choice:
    """The first size that arithmetic does not rule out, without a trial; else the last."""
    rate = bandwidth(device)
    left_out: list[LeftOut] = []
    for candidate in sizes:
        reason = why_too_large(candidate, device) or why_too_slow(
            candidate, rate, messages=1, limit_s=limit_s
        )
        if reason is None or candidate is sizes[-1]:
            break
        left_out.append(LeftOut(candidate.size, reason))
    return Choice(candidate=candidate, all_reduce_gb_per_s=rate / 1e9, left_out=left_out)


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
    return PROBE_BYTES / across_ranks.max_over_ranks(min(seconds))


def why_too_slow(
    candidate: Candidate, rate: float, *, messages: float, limit_s: float
) -> str | None:
    """The reason, if sending the gradient alone takes longer than a step may."""
    if not candidate.workload.is_ours:
        return None  # its parameters are unknown, so it is tried
    parameters = cost.parameter_count(candidate.workload.shape).total
    least_s = messages * footprint.FP32 * parameters / rate
    if least_s <= limit_s:
        return None
    return (
        f"its messages alone take about {least_s:.3g} s at {rate / 1e9:.3g} GB/s, "
        f"more than {limit_s:g} s"
    )


def why_too_large(candidate: Candidate, device: torch.device) -> str | None:
    """The reason, if the cost model puts the ranks of one device over its free memory."""
    expected = expected_memory(candidate.workload, device)
    if expected is None:
        return None
    needed = expected.peak
    sharing = across_ranks.ranks_per_device(device)
    free = across_ranks.min_over_ranks(free_bytes(device))
    if needed * sharing <= USABLE * free:
        return None
    who = f"{sharing} ranks on one device need" if sharing > 1 else "a rank needs"
    return f"{who} about {needed * sharing / GIB:.3g} GiB, {free / GIB:.3g} GiB are free"


def free_bytes(device: torch.device) -> float:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
