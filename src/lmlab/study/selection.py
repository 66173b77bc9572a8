"""Which machine's results a run is about, and whether it may measure them.

A result belongs to the machine that it was measured on. A run that names another machine reads that
machine's results and never adds to them, unless `measure = always` says that its jobs run there: on
a cluster the machine that plans is not the one that measures.

`MACHINE@LABEL` is another set of results of the same machine, in a folder of that name: a repeat,
another driver, another card of the same model. It is measured only when it is asked for by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPEAT = "repeat"  # label of the set from which the report shows how well results repeat


def machine_of(folder: str) -> str:
    """The id of the machine whose results a folder holds."""
    return folder.partition("@")[0]


def device_of(folder: str) -> str:
    """The device type of another machine, from its id, since it cannot be looked up here."""
    return "cpu" if folder.startswith("cpu-") else "cuda"


@dataclass(frozen=True)
class Selection:
    """The folder of the machine's results, its kind of device, and whether to measure."""

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
        device=device_here if machine_of(machine) == here else device_of(machine),
        measuring=measure == "always" or (measure == "auto" and machine_of(machine) == here),
    )


def check_results_exist(selection: Selection, results: Path, here: str) -> None:
    """Raise a ValueError for a run that neither measures nor has results (a misspelled machine)."""
    if selection.measuring or (results / selection.machine).is_dir():
        return
    others = sorted(path.name for path in results.glob("*/") if path.name != here)
    if selection.machine == here:
        fault = f"measure = 'never', but {here} (this machine) has no results here"
        allowed = ["auto", *(f"machine = {name}" for name in others)]
    else:
        fault = f"machine = {selection.machine!r} has no results here"
        allowed = [f"{here} (this one)", *others]
    raise ValueError(f"config: {fault}; allowed: {', '.join(allowed)}")


def compared(config: Mapping[str, Any], results: Path) -> list[str]:
    """The folders of results that `compare` asks for: `all`, or names separated by commas."""
    present = sorted(path.name for path in results.glob("*/"))
    wanted = str(config.get("compare", "all"))
    names = present if wanted == "all" else wanted.split(",")
    if unknown := [name for name in names if name not in present]:
        fault = f"compare = {unknown[0]!r} has no results here"
        raise ValueError(f"config: {fault}; allowed: {', '.join(['all', *present])}")
    return names
