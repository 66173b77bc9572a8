"""Which machine's results a run is about, and whether it may measure them.

A result belongs to the machine that it was measured on. A run that names another machine reads that
machine's results and never adds to them, unless it is told that its jobs run elsewhere: on a
cluster the machine that plans is not the one that measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NothingToRead(ValueError):
    """A run that may not measure, about a machine without results; in one line."""


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


def check_results_are_there(selection: Selection, results: Path, here: str) -> None:
    """A run that measures nothing needs a folder of results, or it is about a misspelt machine."""
    if selection.measuring or (results / selection.machine).is_dir():
        return
    others = sorted(path.name for path in results.glob("*/") if path.name != here)
    if selection.machine == here:
        instead = ", ".join(["auto", *(f"machine = {name}" for name in others)])
        raise NothingToRead(
            f"config: measure = 'never', but {here} (this machine) has no results here; "
            f"allowed: {instead}"
        )
    raise NothingToRead(
        f"config: machine = {selection.machine!r} has no results here; "
        f"allowed: {', '.join([f'{here} (this one)', *others])}"
    )


def _device_of(machine: str) -> str:
    """A machine that is not this one has no device to ask; its id tells."""
    return "cpu" if machine.startswith("cpu-") else "cuda"
