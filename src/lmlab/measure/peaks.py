"""Peak rates of known GPUs, from the vendor's own documents.

A share of peak (MFU) is only as good as the peak it is divided by. Peaks computed by formula have
been wrong by a factor of two (sparsity, boost clock, accumulation type), so each figure is copied
from a datasheet that the table cites, and a device is looked up by its exact name: an `H100 PCIe`
is not an `H100 SXM`, a laptop's RTX 4090 not a desktop's, a MIG slice not a GPU. An unlisted device
has no peak, and the report no MFU for it; measured ceilings still apply.
"""

from functools import cache
from importlib import resources
from typing import Any

import yaml


def peaks_of(device_name: str) -> dict[str, Any] | None:
    """`{"source", "tflops": {precision: rate}, "memory_tb_per_s"}`; None for an unknown device."""
    for entry in _table():
        if device_name in entry["names"]:
            return {key: value for key, value in entry.items() if key != "names"}
    return None


def known_devices() -> list[str]:
    """Every device name with a peak."""
    return [name for entry in _table() for name in entry["names"]]


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files("lmlab.measure").joinpath("peaks.yaml").read_text(encoding="utf-8")
    table: list[dict[str, Any]] = yaml.safe_load(text)
    return table
