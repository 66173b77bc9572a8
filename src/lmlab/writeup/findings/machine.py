"""What the machine card says: how near its own peak the machine comes."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.numbers import listed, percent, significant


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    return {"summary": summary(collected), "ceilings": ceilings(collected)}


def summary(collected: Collected) -> str:
    """What was measured on, for the abstract."""
    if collected.device == "cpu":
        return f"The machine is {collected.device_name}; its times say nothing about a GPU."
    return f"The machine is one {collected.device_name}."


def ceilings(collected: Collected) -> str:
    """The measured matmul rates as shares of what is stated."""
    rows = collected.ceiling("ceilings", "matmul_tflops") or {}
    rates = {name: row["tflops"] for name, row in rows.items() if row["tflops"] is not None}
    if not rates:
        return "No matmul ceiling was measured, so no share of one is given."
    peaks = collected.ceiling("peaks", "tflops") or {}
    told = [
        f"{significant(rate)} TFLOP/s in {name}"
        + (f" ({percent(rate / peaks[name], 2)} of the stated peak)" if name in peaks else "")
        for name, rate in rates.items()
    ]
    unknown = "" if peaks else " No peak of this device is in the sourced table, hence no MFU."
    return f"The fastest matrix products reach {listed(told)}.{unknown}"
