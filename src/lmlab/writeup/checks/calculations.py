"""Answers of the chapter on paper that contradict each other."""

from __future__ import annotations

from lmlab.planning import memory
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import calculations as frames

TOLERANCE = 1e-9


def checks(collected: Collected) -> list[str]:
    """The result holds what the present formulas give, and each device what it can."""
    found = frames.answer(collected)
    if found is None:
        return []
    state = memory.training_state(frames.blocks_of(found)).total
    stored = found.data["state_bytes"]["total"]
    warnings = []
    if abs(state - stored) > TOLERANCE * state:
        warnings.append(
            f"The result holds {stored:,} bytes of training state; the formula gives {state:,}."
        )
    limit = found.settings["device_memory_gb"] * 1e9
    return warnings + [
        f"{row['tokens']:,} tokens on {row['fewest_devices']} devices need "
        f"{row['bytes_a_device']:,.0f} bytes each, more than a device has."
        for row in found.data["batches"]
        if row["bytes_a_device"] is not None and row["bytes_a_device"] > limit * (1 + TOLERANCE)
    ]
