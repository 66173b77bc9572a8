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
Reading = Mapping[str, Any]


def highest(ranks: Sequence[Mapping[str, Any]], moment: str) -> Reading:
    """The reading of the rank that holds most at a moment."""
    readings: list[Reading] = [rank["moments"][moment] for rank in ranks]
    return max(readings, key=lambda reading: int(reading["allocated_bytes"]))


def part_bytes(ranks: Sequence[Mapping[str, Any]], moment: str, part: str) -> int:
    """One part of what the fullest rank holds."""
    return int(highest(ranks, moment)["parts_bytes"][part])


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
