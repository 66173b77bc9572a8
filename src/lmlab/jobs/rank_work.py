"""What one rank of a data-parallel job computes, and the records that these chapters share.

All ranks start from the same seeded weights and draw their own tokens, so that their gradients
differ and averaging them has an effect. All variants use `torch.optim.AdamW`: these chapters
compare communication, and PyTorch's sharded variants require PyTorch's optimizers. The other
chapters use the library's own AdamW.

Records: `time` per variant and phase (slowest rank of each round) and, from a few profiled steps,
device time (busiest rank of each step); `rank_time` per variant, phase and rank; parameters, tokens
and other facts about a step. One more profiled step per variant gives rank 0's `profiled_time` per
activity (compute, communication, copies, and overlapped: compute while a message was in flight),
`messages_seen` and `messages_seen_as`, and `overlapped_share` per rank.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.jobs.workload import OWN_ATTENTION, Workload, workload_of
from lmlab.measure import across_ranks
from lmlab.measure.busy import device_time
from lmlab.measure.clock import PhaseClock
from lmlab.measure.overlap import profile_overlap
from lmlab.measure.records import Label, Record, timed, value, without_value
from lmlab.measure.rounds import Rounds, TimedStep, interleave
from lmlab.model import footprint
from lmlab.model.loss import cross_entropy
from lmlab.study.points import Point

Ready = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Within the context a variant has its memory and is warm; yields its step."""
# Large enough that no two ranks draw the same tokens, even if studies use neighboring seeds.
SEED_STRIDE = 10_007
ACTIVITIES = ("compute", "communication", "copies", "overlapped")


def candidates(point: Point) -> dict[str, Workload]:
    """The workloads a point may be measured with, by size, in the study's order."""
    return {
        shape["size"]: workload_of(point, mode="train_step", **shape)
        for shape in point.settings["sizes"]
    }


class RankWork:
    """A workload on this rank."""

    def __init__(
        self, workload: Workload, device: torch.device, *, own_tokens: bool = True
    ) -> None:
        self.workload, self.device = workload, device
        seed = workload.seed + (SEED_STRIDE * (1 + dist.get_rank()) if own_tokens else 0)
        self.tokens, self.targets = replace(workload, seed=seed).batch(device)

    def model(self) -> nn.Module:
        """The model with its seeded weights, the same on every rank."""
        return self.workload.build(self.device)

    def loss(self, model: nn.Module) -> Tensor:
        """Loss on this rank's tokens."""
        with self.workload.precision_context(self.device):
            return cross_entropy(model(self.tokens), self.targets)


def release(device: torch.device) -> None:
    """Return freed memory to the allocator, and from there to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def expected_memory(workload: Workload, device: torch.device) -> footprint.Footprint | None:
    """The cost model's memory of an unsharded train step; None for a model it does not describe."""
    if not workload.is_ours or workload.attention != OWN_ATTENTION:
        return None
    return footprint.memory(
        workload.shape,
        workload.precision.name,  # type: ignore[arg-type]
        "train_step",
        device="cuda" if device.type == "cuda" else "cpu",
    )


def take_turns(steps: Mapping[str, TimedStep], point: Point, device: torch.device) -> Rounds:
    """Time all variants in interleaved rounds, with the point's warm-up, rounds and time cap."""
    asked = {key: point.settings[key] for key in ("warmup", "rounds", "time_cap_s")}
    return interleave(steps, device=device, **asked)


def timed_step(ready: Ready) -> TimedStep:
    """A training step as one phase: synchronizing within it would prevent overlap."""

    def step(clock: PhaseClock) -> None:
        with ready() as run:
            dist.barrier()  # ranks may take different times to build a variant
            with clock.phase("step"):
                run()

    return step


def relative_error(found: Iterable[float], expected: Iterable[float]) -> float:
    """The largest relative difference between numbers of a variant and of the reference."""
    pairs = zip(found, expected, strict=True)
    return across_ranks.max_error(abs(own - right) / (abs(right) or 1.0) for own, right in pairs)


def why_wrong(variant: str, what: str, error: float, allowed: float) -> list[Record]:
    """A failed `time` record for a variant whose error exceeds the tolerance, else no record."""
    if error <= allowed:
        return []
    reason = f"{what} are off by {error:.2g}, {allowed:g} is allowed"
    return [without_value("time", "failed", reason, variant=variant, phase="total")]


def per_rank(quantity: str, ranks: Iterable[Any], unit: str, **labels: Label) -> list[Record]:
    """A record for each rank that has a value."""
    return [
        value(quantity, own, unit, **labels, rank=rank)
        for rank, own in enumerate(ranks)
        if own is not None
    ]


def round_records(rounds: Rounds, phases: Sequence[str] = ("total",)) -> list[Record]:
    """Times of all variants: of the slowest rank, and of every rank."""
    records = []
    for variant, by_phase in rounds.samples_ms.items():
        for phase in phases:
            labels = {"variant": variant, "phase": phase}
            slowest = rounds.slowest(variant, phase)
            records.append(timed(slowest, "time", **labels))
            for rank, samples in enumerate(by_phase[phase]):
                own = replace(slowest, samples_ms=tuple(samples))
                records.append(timed(own, "rank_time", **labels, rank=rank))
    return records


def overlap_records(
    variants: Mapping[str, Ready], device: torch.device
) -> tuple[list[Record], dict[str, Any]]:
    """Profile every variant; returns records, and this rank's intervals by variant for a figure."""
    profile_overlap(lambda: None, device)  # the first session is slow and may lose kernels
    records: list[Record] = []
    intervals = {}
    for variant, ready in variants.items():
        with ready() as step:
            dist.barrier()
            found = profile_overlap(step, device)
            records += device_time_record(variant, step, device)
        intervals[variant] = found["intervals_ms"]
        records += [
            value("profiled_time", found[f"{name}_ms"], "ms", variant=variant, activity=name)
            for name in ACTIVITIES
        ]
        records.append(value("messages_seen", found["messages_seen"], "", variant=variant))
        if found["seen_as"]:
            records.append(value("messages_seen_as", found["seen_as"], "", variant=variant))
        shares = across_ranks.gather(found["overlapped_share"])
        records += per_rank("overlapped_share", shares, "", variant=variant)
    return records, intervals


def device_time_record(
    variant: str, step: Callable[[], object], device: torch.device
) -> list[Record]:
    """Busy time of the device per step, on the busiest rank; no record on a CPU. The driver
    time-slices ranks that share a GPU, so a kernel's duration includes other ranks' slices."""
    ranks = [own for own in across_ranks.gather(device_time(step, device)) if own]
    if not ranks:
        return []
    steps = zip(*(own.samples_ms for own in ranks), strict=True)
    busiest = replace(ranks[0], samples_ms=tuple(map(max, steps)))
    return [timed(busiest, "time", variant=variant, phase="total")]


def work_records(work: RankWork, model: nn.Module) -> list[Record]:
    """Facts about a step: its size, optimizer, profiler and threads."""
    return [
        value("parameters", sum(p.numel() for p in model.parameters()), ""),
        value("gradient_bytes", sum(p.nbytes for p in model.parameters()), "B"),
        value("tokens", work.workload.shape.tokens, ""),
        value("optimizer", "torch.optim.AdamW", ""),
        value("profiler", f"torch profiler {torch.__version__}", ""),
        value("tf32", torch.get_float32_matmul_precision() != "highest", ""),
        value("threads", torch.get_num_threads(), ""),
    ]
