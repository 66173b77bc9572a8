"""Expected ranges of key figures: whether a run is what its GPU usually gives, and if not, why.

`report/references/bands.yaml` says which figures, and which range each has on which GPU. A run
outside is not wrong, but a reader should know before comparing it with anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lmlab.report.frame import Results, select

SLOWER_IS_LESS = ("TFLOP/s", "GB/s")


@cache
def read(path: Path) -> Mapping[str, Any]:
    """The bands of all GPUs."""
    found: Mapping[str, Any] = yaml.safe_load(path.read_text())
    return found


def against(results: Results, bands: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every figure of this machine that has a range, with its value and whether it is outside."""
    gpu = bands["gpus"].get(results.name, {})
    found = []
    for name, figure in bands["figures"].items():
        rows = select(results.rows, status="ok", **figure["where"])
        expected = gpu.get(name) or _share_of_stated(results, bands["shares"].get(name))
        if expected is None or len(rows) != 1:
            continue
        row: Any = rows.iloc[0]
        low, high = expected
        value = float(row["value"])
        slow = value < low if figure["unit"] in SLOWER_IS_LESS else value > high
        outside = not low <= value <= high
        found.append(
            {
                **{"name": name, "unit": figure["unit"], "value": value, "low": low, "high": high},
                "outside": outside,
                "cause": _cause(results, row, figure["bound"], gpu, slow=slow) if outside else "",
            }
        )
    return found


def _share_of_stated(results: Results, share: Mapping[str, Any] | None) -> list[float] | None:
    stated = results.value(chapter="machine", **share["of"]) if share else None
    return [limit * stated for limit in share["range"]] if share and stated else None


def _cause(
    results: Results, row: Mapping[str, Any], bound: str, gpu: Mapping[str, Any], *, slow: bool
) -> str:
    """The likeliest reason, from what the run recorded of the GPU."""
    limit = results.value(chapter="machine", quantity="power_limit_w")
    usual = gpu.get("power_limit_w")
    flags = row["flags"] or ()
    if not slow:
        return "newer libraries, or work that was left out"
    if "gpu_shared" in flags:
        return "another process used the GPU"
    if "throttled" in flags:
        return "the GPU was throttled by heat or its power supply"
    if limit and usual and limit < usual:
        return f"a power limit of {limit:g} W instead of {usual:g} W"
    if "power_capped" in flags:
        return "the GPU ran into its power limit"
    return "a slow or busy host" if bound == "host" else "lower clocks or another process"
