"""Which machine's results a run is about, and whether it may measure them.

A result belongs to the machine that it was measured on. A run that names another machine reads that
machine's results and never adds to them, unless it is told that its jobs run elsewhere: on a
cluster the machine that plans is not the one that measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Selection:
    """The machine whose folder is read, its kind of device, and whether to measure."""

    machine: str
    device: str
    measuring: bool


def select(config: Mapping[str, Any], here: str, device_here: str) -> Selection:
    """Read `machine` and `measure` of a configuration, given the machine that runs it."""
    asked = str(config.get("machine", "auto"))
    machine = here if asked == "auto" else asked
    measure = config.get("measure", "auto")
    return Selection(
        machine=machine,
        device=device_here if machine == here else _device_of(machine),
        measuring=measure == "always" or (measure == "auto" and machine == here),
    )


def _device_of(machine: str) -> str:
    """A machine that is not this one has no device to ask; its id tells."""
    return "cpu" if machine.startswith("cpu-") else "cuda"
