"""Records that the chapters on several ranks share: rounds of variants, and their overlap.

Records: `time` per variant and phase (slowest rank of each round), `rank_time` per variant, phase
and rank; from one profiled step per variant `profiled_time` per activity (compute, communication,
copies, and overlapped: computation while a message was in flight; rank 0), `messages_seen`,
`messages_seen_as`, and `overlapped_share` per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmlab.jobs.rank_work import OPTIMIZER, RankWork, parameter_bytes
from lmlab.measure import across_ranks
from lmlab.measure.overlap import profile_overlap, start_profiler
from lmlab.measure.records import Record, timed, value
from lmlab.measure.rounds import Rounds, TimedStep, interleave
from lmlab.measure.statistics import Measurement
from lmlab.study.points import Point

Ready = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Within the context a variant has its memory and is warm; yields its step."""

ACTIVITIES = ("compute", "communication", "copies", "overlapped")


def take_turns(steps: Mapping[str, TimedStep], point: Point, device: torch.device) -> Rounds:
    """Rounds of all variants, as many as the point asks for and its time allows."""
    return interleave(
        steps,
        device=device,
        warmup=point.settings["warmup"],
        rounds=point.settings["rounds"],
        time_cap_s=point.settings["time_cap_s"],
    )


def round_records(rounds: Rounds, phases: Sequence[str] = ("total",)) -> list[Record]:
    """Times of all variants: of the slowest rank, and of every rank."""
    records = []
    for variant, by_phase in rounds.samples_ms.items():
        for phase in phases:
            labels = {"variant": variant, "phase": phase}
            records.append(timed(rounds.slowest(variant, phase), "time", **labels))
            for rank, samples in enumerate(by_phase[phase]):
                own = Measurement(
                    samples_ms=tuple(samples), clock="wall", cache="warm", stopped=rounds.stopped
                )
                records.append(timed(own, "rank_time", **labels, rank=rank))
    return records


def overlap_records(
    variants: Mapping[str, Ready], device: torch.device
) -> tuple[list[Record], dict[str, Any]]:
    """One profiled step per variant: records, and rank 0's intervals for a figure."""
    start_profiler(device)
    records: list[Record] = []
    intervals = {}
    for variant, ready in variants.items():
        with ready() as step:
            dist.barrier()
            overlap = profile_overlap(step, device)
        found = overlap.to_json()
        intervals[variant] = found["intervals_ms"]
        records += [
            value("profiled_time", found[f"{name}_ms"], "ms", variant=variant, activity=name)
            for name in ACTIVITIES
        ]
        records.append(value("messages_seen", found["messages_seen"], "", variant=variant))
        if found["seen_as"]:
            records.append(value("messages_seen_as", found["seen_as"], "", variant=variant))
        records += [
            value("overlapped_share", share, "", variant=variant, rank=rank)
            for rank, share in enumerate(across_ranks.gather(overlap.overlapped_share))
            if share is not None
        ]
    return records, intervals


def work_records(work: RankWork, model: nn.Module) -> list[Record]:
    """What a step consists of on each rank."""
    return [
        value("parameters", sum(p.numel() for p in model.parameters()), ""),
        value("gradient_bytes", parameter_bytes(model), "B"),
        value("tokens", work.workload.shape.tokens, ""),
        value("optimizer", OPTIMIZER, ""),
        value("profiler", f"torch profiler {torch.__version__}", ""),
        value("tf32", torch.get_float32_matmul_precision() != "highest", ""),
        value("threads", torch.get_num_threads(), ""),
    ]
