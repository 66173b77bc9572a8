"""The machine card: what the machine is, what it reaches, what its vendor states.

Every other number of a study is read against these: a time becomes a share of the measured matmul
rate, or of the stated peak where the device's datasheet is known.

Records: `matmul_rate` per dtype (with the `side` of the fastest matmul) and `copy_bandwidth`;
`stated_matmul_rate`, `stated_bandwidth` and `stated_source` if the datasheet is known; and one
record per fact of the card (`sms`, `l2_bytes`, `power_limit_w`, `cpu_model`, ...).
"""

from collections.abc import Mapping
from typing import Any

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.measure.card import machine_card
from lmlab.measure.ceilings import measure_ceilings
from lmlab.measure.peaks import peaks_of
from lmlab.measure.records import Record, by_label, value
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Describe the device and measure its ceilings; `quick` takes small shapes."""
    torch.manual_seed(point.settings["seed"])
    card = machine_card(device)
    ceilings = measure_ceilings(device, quick=point.settings["quick"])
    return Outcome(measurements=[*ceilings, *facts(card, peaks_of(card["name"]))])


def facts(card: Mapping[str, Any], peaks: Mapping[str, Any] | None) -> list[Record]:
    """Records of the vendor's stated rates and of every fact on the card."""
    records = []
    if peaks is not None:
        records += by_label("stated_matmul_rate", "dtype", peaks["tflops"], "TFLOP/s")
        records.append(value("stated_bandwidth", peaks["memory_tb_per_s"] * 1e3, "GB/s"))
        records.append(value("stated_source", peaks["source"], ""))
    return records + [
        value(name, fact, "B" if name.endswith("_bytes") else "", fact=name)
        for name, fact in card.items()
    ]
