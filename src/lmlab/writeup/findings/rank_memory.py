"""Sentences on a rank's memory that the sharding chapters share: device, peaks, the cost model.

Tensors, the allocator and the device give three numbers, and sharding lowers the first for certain.
That the last can rise meanwhile has one cause on a GPU: the allocator keeps what was freed, and
takes more from the device when no free piece is large enough for the next tensor. Readings show it:
what the allocator keeps grows although far less than that is in use at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.writeup.frames.moments import (
    MOMENTS,
    PHASES,
    device_holds_more_than,
    device_rises_while_tensors_fall,
    highest,
    peak_bytes,
    step_peak,
)
from lmlab.writeup.frames.rank_jobs import Job
from lmlab.writeup.numbers import binary_bytes, percent

Arms = Mapping[str, Mapping[str, Any]]

AS_EXPECTED = 0.02
"""Differences below this share are rounding: step counters, padding of the allocator."""


def device(job: Job, arms: Arms, labels: Mapping[str, str], plain: str) -> str:
    """Whether the device reports more where tensors hold less, and why that can be."""
    for name, arm in arms.items() if plain in arms else ():
        base = arms[plain]
        moment = device_holds_more_than(
            arm["ranks"], base["ranks"]
        )  # the base not more than itself
        if moment is not None:
            return f"{job.who}: {_beside(job, labels[name], arm, base, moment)}"
    for name, arm in arms.items():
        found = device_rises_while_tensors_fall(arm["ranks"])
        if found is not None:
            return f"{job.who}: with {labels[name]} {_between(job, arm, *found)}"
    return (
        f"{job.who}: nowhere here does the device report more where tensors hold less. It could: "
        "what was freed stays with the allocator, and what is taken anew adds to it."
    )


def _beside(
    job: Job, label: str, arm: Mapping[str, Any], plain: Mapping[str, Any], moment: str
) -> str:
    """Two arms at one moment."""
    ours, theirs = highest(arm["ranks"], moment), highest(plain["ranks"], moment)
    less, more = (
        binary_bytes(abs(ours[key] - theirs[key])) for key in ("allocated_bytes", "device_bytes")
    )
    return (
        f"{MOMENTS[moment]}, tensors hold {less} less with {label} than unsharded, and the device "
        f"reports {more} more: {_why(job, arm, moment)}"
    )


def _between(job: Job, arm: Mapping[str, Any], before: str, after: str) -> str:
    """Two moments of one arm."""
    return (
        f"the device reports more {MOMENTS[after]} than {MOMENTS[before]}, while tensors hold "
        f"less: {_why(job, arm, after)}"
    )


def _why(job: Job, arm: Mapping[str, Any], moment: str) -> str:
    if job.data["ranks"]["device"] == "cpu":
        return (
            "memory that was freed stays with the process, and buffers that no part counts are new."
        )
    if moment == "after_step" and (grown := _grew_for_want_of_room(arm)):
        return grown
    return (
        "the allocator keeps what was freed and takes more where no free piece is large enough, "
        "and libraries and communication hold memory that is none of its tensors."
    )


def _grew_for_want_of_room(arm: Mapping[str, Any]) -> str | None:
    """The allocator took more in the optimizer's step, although it had more than the step used."""
    before, after = (
        highest(arm["ranks"], moment)["reserved_bytes"] for moment in ("before_step", "after_step")
    )
    used = peak_bytes(arm["ranks"], "optimizer")
    if used is None or not used < before < after:
        return None
    return (
        f"before the step the allocator keeps {binary_bytes(before)}, the step uses "
        f"{binary_bytes(used)} at most, and still the allocator takes "
        f"{binary_bytes(after - before)} more. What was free lay in pieces too small for the "
        "tensors of the step."
    )


def peaks(arms: Arms, plain: str, ours: str, words: Mapping[str, str]) -> str:
    """The highest point of a step without and with sharding; empty where nobody counts it."""
    one, other = (
        step_peak(arms[name]["ranks"]) if name in arms else None for name in (plain, ours)
    )
    if one is None or other is None:
        return ""
    before, after = one[0], other[0]
    where = PHASES[other[1]] if one[1] == other[1] else f"{PHASES[one[1]]} and {PHASES[other[1]]}"
    verb = "falls" if after < before else "rises"
    change = (
        f"stays at {binary_bytes(before)}"
        if after == before
        else f"{verb} from {binary_bytes(before)} to {binary_bytes(after)}, to "
        f"{percent(after / before, 2)}"
    )
    return (
        f" What decides whether a step fits is its peak, in {where}: with {words[ours]} it "
        f"{change}."
    )


def expected(job: Job, off: Mapping[str, float] | None) -> str:
    """Whether parts are as large as the cost model says, by how far each is off."""
    if off is None:
        return f"{job.who}: the cost model does not describe this model."
    worst = max(off, key=lambda what: abs(off[what]))
    if abs(off[worst]) <= AS_EXPECTED:
        return (
            f"{job.who}: every part is as large as the cost model expects, within "
            f"{percent(AS_EXPECTED, 1)}."
        )
    word = "more" if off[worst] > 0 else "less"
    return (
        f"{job.who}: the cost model is furthest off with {worst}, of which there is "
        f"{percent(abs(off[worst]), 2)} {word} than expected."
    )
