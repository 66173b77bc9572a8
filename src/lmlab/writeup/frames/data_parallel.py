"""The variants of one job as rows: step times, what each adds to a silent step, and its overlap."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmlab.writeup.frames.rank_jobs import Job, skew, slowest, sound
from lmlab.writeup.overhead_model import Fit, Sent, fit
from lmlab.writeup.paired import RatioInterval, ratio_interval

ALONE, TORCH = "alone", "torch_ddp"
DURING = ("overlapped", "bucketed_")
"""Beginnings of the names of variants that talk during backward, PyTorch's left aside."""


@dataclass(frozen=True)
class Variant:
    """One arm that has times."""

    name: str
    label: str
    samples_ms: list[float]
    """Of the slowest rank, round by round."""
    rank_medians_ms: list[float]
    skew_ms: float
    added_ms: float | None
    """Median over rounds of what it takes longer than a silent step."""
    entry: Mapping[str, Any]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def plain_label(self) -> str:
        """Its label within a list: `bucketed 25 MB`."""
        return self.label.replace(", ", " ")

    @property
    def trace(self) -> Mapping[str, Any]:
        trace: Mapping[str, Any] = self.entry["trace"]
        return trace

    @property
    def worst_skew_share(self) -> float:
        """How far apart the first and the last rank finish in the worst round, of its step."""
        rounds = zip(*self.entry["ranks_ms"], strict=True)
        return max((max(times) - min(times)) / max(times) for times in rounds)

    @property
    def hidden(self) -> float | None:
        """Share of the time of its messages in which something was computed."""
        share = self.trace["overlapped_share"]
        return None if share is None else float(share)


def label(name: str, job: Job) -> str:
    """A variant as a reader knows it."""
    if name == ALONE:
        return "no communication"
    if name == TORCH:
        return f"PyTorch DDP, {job.data['torch_bucket_mb']:g} MB"
    if name.startswith("bucketed_"):
        return f"bucketed, {float(name.removeprefix('bucketed_')):,g} MB"
    return name


def variants(job: Job) -> list[Variant]:
    """Every arm with times, the silent one first."""
    arms = sound(job.data["arms"])
    silent = slowest(arms[ALONE]["ranks_ms"]) if ALONE in arms else None
    return [_variant(name, arm, silent, job) for name, arm in arms.items()]


def _variant(name: str, arm: Mapping[str, Any], silent: list[float] | None, job: Job) -> Variant:
    samples = slowest(arm["ranks_ms"])
    added = None
    if silent is not None and name != ALONE:
        added = statistics.median(a - b for a, b in zip(samples, silent, strict=True))
    medians = [statistics.median(times) for times in arm["ranks_ms"]]
    return Variant(name, label(name, job), samples, medians, skew(arm["ranks_ms"]), added, arm)


def talking(job: Job) -> list[Variant]:
    """The variants that communicate."""
    return [variant for variant in variants(job) if variant.name != ALONE]


def backward_ms(job: Job) -> float:
    """How long backward lasts in a step that talks to nobody."""
    return statistics.median(job.data["phases_ms"]["backward"])


def failures(job: Job) -> dict[str, str]:
    """Arms without times and why."""
    return {
        label(name, job): str(arm["reason"])
        for name, arm in job.data["arms"].items()
        if arm["status"] != "ok"
    }


def sent(job: Job) -> list[Sent]:
    """What our variants sent and what it added, for the model of the overhead."""
    backward = backward_ms(job)
    return [
        Sent(
            name=variant.name,
            total_bytes=int(variant.entry["message_bytes"]),
            messages=int(variant.entry["messages"]),
            hide_ms=backward if variant.name.startswith(DURING) else 0.0,
            added_ms=variant.added_ms,
        )
        for variant in talking(job)
        if variant.added_ms is not None and variant.entry["messages"]
    ]


def overhead_fit(job: Job) -> Fit | None:
    """The link, from all of our variants of a job."""
    return fit(sent(job))


def against_torch(job: Job) -> tuple[Variant, Variant, RatioInterval] | None:
    """Ours with buckets of PyTorch's size, PyTorch's, and their ratio."""
    known = {variant.name: variant for variant in variants(job)}
    ours = known.get(f"bucketed_{job.data['torch_bucket_mb']:g}")
    theirs = known.get(TORCH)
    if ours is None or theirs is None:
        return None
    interval = ratio_interval(ours.samples_ms, theirs.samples_ms)
    return None if interval is None else (ours, theirs, interval)
