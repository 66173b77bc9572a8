"""A rank's memory at the moments of its first train step, as the sharding chapters print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

MOMENTS = {
    "initialised": "after initialisation",
    "after_forward": "after forward",
    "before_step": "before the step",
    "after_step": "after the step",
}
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "other": "other",
}
PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer's step"}
# When each part is there in full, for the comparison with the cost model.
FULL_AT = {
    "parameters": "initialised",
    "gradients": "before_step",
    "optimizer_state": "after_step",
    "activations": "after_forward",
}
Reading = Mapping[str, Any]


def highest(ranks: Sequence[Mapping[str, Any]], moment: str) -> Reading:
    """The reading of the rank that holds most at a moment."""
    readings: list[Reading] = [rank["moments"][moment] for rank in ranks]
    return max(readings, key=lambda reading: int(reading["allocated_bytes"]))


def part_bytes(ranks: Sequence[Mapping[str, Any]], moment: str, part: str) -> int:
    """One part of what the fullest rank holds."""
    return int(highest(ranks, moment)["parts_bytes"][part])


def peak_bytes(ranks: Sequence[Mapping[str, Any]], phase: str) -> int | None:
    """The highest that any rank reached in a phase; None where the device does not count it."""
    peaks = [rank["peaks_bytes"][phase] for rank in ranks]
    return None if None in peaks else max(map(int, peaks))


def step_peak(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The highest of the whole step, and the phase in which it lies."""
    peaks = [(peak, phase) for phase in PHASES if (peak := peak_bytes(ranks, phase)) is not None]
    return max(peaks) if peaks else None


def device_holds_more_than(
    arm: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> str | None:
    """The last moment at which an arm's tensors hold less than the base's, its device more."""
    for moment in reversed(MOMENTS):
        one, other = highest(arm, moment), highest(base, moment)
        if (
            one["allocated_bytes"] < other["allocated_bytes"]
            and one["device_bytes"] > other["device_bytes"]
        ):
            return moment
    return None


def device_rises_while_tensors_fall(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The first two moments between which allocated falls and the device reports more."""
    for before, after in pairwise(MOMENTS):
        one, other = highest(ranks, before), highest(ranks, after)
        if (
            other["allocated_bytes"] < one["allocated_bytes"]
            and other["device_bytes"] > one["device_bytes"]
        ):
            return before, after
    return None
