"""Sentences on a rank's memory that the sharding chapters share: device, peaks, the cost model.

Tensors, the allocator and the device give three numbers, and sharding lowers the first for certain.
That the last can rise meanwhile has one cause on a GPU: the allocator keeps what was freed, and
takes more from the device when no free piece is large enough for the next tensor. Readings show it:
what the allocator keeps grows although far less than that is in use at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from lmlab.writeup.frames.moments import (
    MOMENTS,
    PHASES,
    Reading,
    device_holds_more_than,
    device_rises_while_tensors_fall,
    highest,
    peak_bytes,
    step_peak,
)
from lmlab.writeup.frames.rank_jobs import Job
from lmlab.writeup.numbers import binary_bytes, listed, percent

Arms = Mapping[str, Mapping[str, Any]]

AS_EXPECTED = 0.02
"""Differences below this share are rounding: step counters, padding of the allocator."""


def device(job: Job, arms: Arms, labels: Mapping[str, str], plain: str) -> str:
    """What the device reports after a step, and whether more where tensors hold less."""
    found = " ".join(
        filter(None, [_shares(arms, labels, plain), _apart(arms, labels, plain),
                      _surprise(job, arms, labels, plain)])
    )  # fmt: skip
    return f"{job.who}: {found or 'the memory of no two arms was read.'}"


def _shares(arms: Arms, labels: Mapping[str, str], plain: str) -> str:
    """The device's number of every arm beside that of the unsharded one."""
    if plain not in arms or len(arms) < 2:
        return ""
    base = _after(arms[plain])["device_bytes"]
    shares = [
        f"{percent(_after(arm)['device_bytes'] / base, 2)} with {labels[name]}"
        for name, arm in arms.items()
        if name != plain
    ]
    return (
        f"after the step the device reports {binary_bytes(base)} with {labels[plain]}; it is "
        f"{listed(shares)}."
    )


def _apart(arms: Arms, labels: Mapping[str, str], plain: str) -> str:
    """Two sharded arms whose tensors hold the same, and of which one takes more of the device."""
    for pair in combinations([name for name in arms if name != plain], 2):
        more, less = sorted(pair, key=lambda name: -int(_after(arms[name])["device_bytes"]))
        one, other = _after(arms[more]), _after(arms[less])
        excess = one["device_bytes"] / other["device_bytes"] - 1
        if abs(one["allocated_bytes"] / other["allocated_bytes"] - 1) > AS_EXPECTED:
            continue
        if excess > AS_EXPECTED:
            return (
                f"Tensors hold as much with {labels[more]} as with {labels[less]} (within "
                f"{percent(AS_EXPECTED, 1)}), but the device reports {percent(excess, 2)} more"
                f"{_kept_by_allocators(one, other)}."
            )
    return ""


def _kept_by_allocators(one: Reading, other: Reading) -> str:
    """What allocators keep, where there is one that says."""
    if one["reserved_bytes"] is None or other["reserved_bytes"] is None:
        return ""
    kept, less = (binary_bytes(reading["reserved_bytes"]) for reading in (one, other))
    return f": the allocator keeps {kept} instead of {less}"


def _after(arm: Mapping[str, Any]) -> Reading:
    return highest(arm["ranks"], "after_step")


def _surprise(job: Job, arms: Arms, labels: Mapping[str, str], plain: str) -> str:
    """Where the device reports more although tensors hold less, and why that can be."""
    for name, arm in arms.items() if plain in arms else ():
        base = arms[plain]
        moment = device_holds_more_than(
            arm["ranks"], base["ranks"]
        )  # the base not more than itself
        if moment is not None:
            return _beside(job, labels[name], arm, base, moment)
    for name, arm in arms.items():
        found = device_rises_while_tensors_fall(arm["ranks"])
        if found is not None:
            return f"With {labels[name]} {_between(job, arm, *found)}"
    return ""


def _beside(
    job: Job, label: str, arm: Mapping[str, Any], plain: Mapping[str, Any], moment: str
) -> str:
    """Two arms at one moment."""
    ours, theirs = highest(arm["ranks"], moment), highest(plain["ranks"], moment)
    less, more = (
        binary_bytes(abs(ours[key] - theirs[key])) for key in ("allocated_bytes", "device_bytes")
    )
    return (
        f"{MOMENTS[moment].capitalize()}, tensors hold {less} less with {label} than unsharded, "
        f"and the device reports {more} more: {_why(job, arm, moment)}"
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
