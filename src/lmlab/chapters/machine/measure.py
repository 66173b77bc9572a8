"""The machine card as a result: what the machine is, what it reaches, what its vendor promises.

Every other number of a study is read against these: a time becomes a share of the measured matmul
ceiling, or of the peak where the device's datasheet is known. `data` holds `card`, `ceilings` and
`peaks` (null for a device that the table of datasheets does not list).
"""

from __future__ import annotations

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.measure.card import machine_card
from lmlab.measure.ceilings import measure_ceilings
from lmlab.measure.peaks import peaks_of
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Describe the device and measure its ceilings; `quick` takes small shapes."""
    torch.manual_seed(point.settings["seed"])
    card = machine_card(device)
    return Outcome(
        data={
            "card": card,
            "ceilings": measure_ceilings(device, quick=point.settings["quick"]),
            "peaks": peaks_of(card["name"]),
        }
    )
