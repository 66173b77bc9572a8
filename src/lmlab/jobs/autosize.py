"""Choose the model size a job measures: the largest that fits and keeps its step short.

Link bandwidth varies by a factor of a thousand: eight gigabytes of gradients take tens of
milliseconds over NVLink and many seconds through the host. So a study lists several sizes, largest
first, and a limit for the step time. Where arithmetic suffices, a size is ruled out before anything
is built: memory by the cost model, time by gradient bytes over a measured bandwidth. Otherwise a
trial step decides. All ranks use the same numbers: the least free memory and the slowest step.

Records: `size` with a `purpose`, and a `size` without a value per rejected `candidate`;
`all_reduce_bandwidth` (tensor bytes over time), `trial_step`, `over_limit`.
"""

from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from lmlab.jobs.rank_work import RankWork, candidates, expected_memory, release
from lmlab.jobs.workload import Workload
from lmlab.measure import across_ranks
from lmlab.measure.records import Record, value, without_value
from lmlab.measure.rounds import sample_ms
from lmlab.model import cost, footprint
from lmlab.study.points import Point

GIB = 2**30
PROBE_BYTES = 32 * 2**20
PROBES = 3
Trial = Callable[[RankWork], Callable[[], object]]
"""Builds what a trial runs; returns its step."""
USABLE = 0.9  # of free memory: allocators round up, and libraries need some


def choose(
    point: Point,
    device: torch.device,
    *,
    purpose: str,
    limit_s: float,
    messages: float = 1,
    trial: Trial | None = None,
) -> tuple[Workload, list[Record]]:
    """Choose the first size that fits and whose step stays under the limit (the last may exceed
    it); returns its workload and the records of the choice.

    A step sends at least `messages` times the gradient's bytes. Without a trial, arithmetic alone
    decides.
    """
    sizes = candidates(point)
    rate = bandwidth(device)
    left_out: list[Record] = []
    *_, smallest = sizes
    for size, workload in sizes.items():
        last, step_s = size == smallest, 0.0
        reason = why_too_large(workload, device)
        if reason is None and not last:
            reason = why_too_slow(workload, rate, messages=messages, limit_s=limit_s)
        if reason is None and trial is not None:
            step_s = trial_s(trial, workload, device)
            release(device)
            if step_s > limit_s and not last:
                reason = f"a step takes {step_s:.3g} s, more than {limit_s:g} s"
        if reason is None:
            chosen = [
                value("size", size, "", purpose=purpose),
                value("all_reduce_bandwidth", rate / 1e9, "GB/s", purpose=purpose),
                value("over_limit", step_s > limit_s, "", purpose=purpose),
            ]
            if trial is not None:
                chosen.append(value("trial_step", step_s * 1e3, "ms", purpose=purpose))
            return workload, chosen + left_out
        labels = {"purpose": purpose, "candidate": size}
        left_out.append(without_value("size", "unsupported", reason, **labels))
    raise MemoryError(f"no size fits: {size} {reason}")


def trial_s(trial: Trial, workload: Workload, device: torch.device) -> float:
    """Seconds that the second run of a step takes on the slowest rank."""
    step = trial(RankWork(workload, device))
    _, second_ms = [sample_ms(step, device) for _ in range(2)]
    return across_ranks.max_over_ranks(second_ms / 1e3)


def bandwidth(device: torch.device) -> float:
    """All-reduce bandwidth between the ranks in bytes per second; the same number on every rank."""
    buffer = torch.ones(PROBE_BYTES // 4, device=device)
    seconds = [sample_ms(lambda: dist.all_reduce(buffer), device) / 1e3 for _ in range(PROBES)]
    return PROBE_BYTES / across_ranks.max_over_ranks(min(seconds))


def why_too_slow(workload: Workload, rate: float, *, messages: float, limit_s: float) -> str | None:
    """The reason, if sending the gradient alone exceeds the step limit; None for a model whose
    parameter count is unknown."""
    if not workload.is_ours:
        return None
    parameters = cost.parameter_count(workload.shape).total
    least_s = messages * footprint.FP32 * parameters / rate
    if least_s <= limit_s:
        return None
    return (
        f"its messages alone take about {least_s:.3g} s at {rate / 1e9:.3g} GB/s, "
        f"more than {limit_s:g} s"
    )


def why_too_large(workload: Workload, device: torch.device) -> str | None:
    """The reason, if the cost model puts the ranks of one device over its free memory."""
    expected = expected_memory(workload, device)
    if expected is None:
        return None  # a model that the cost model does not know is tried
    sharing = across_ranks.ranks_per_device(device)
    needed = sharing * expected.peak
    free = across_ranks.min_over_ranks(free_bytes(device))
    if needed <= USABLE * free:
        return None
    who = f"{sharing} ranks on one device need" if sharing > 1 else "a rank needs"
    return f"{who} about {needed / GIB:.3g} GiB, {free / GIB:.3g} GiB are free"


def free_bytes(device: torch.device) -> float:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
