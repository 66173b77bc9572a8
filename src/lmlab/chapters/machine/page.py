"""The machine card: measured ceilings against stated peaks, and what the machine is.

`report/references/bands.yaml` has the usual ranges of a GPU's key figures. A figure outside its
range is not wrong, but a reader should know before comparing the run with anything.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lmlab.report.frame import Results, Rows, combine, derived, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time
from lmlab.study.files import REFERENCES

TITLE = "The machine"

MEASURED, STATED = ["matmul_rate", "copy_bandwidth"], ["stated_matmul_rate", "stated_bandwidth"]
HIGHER_IS_BETTER = ("TFLOP/s", "GB/s")
WHY_FASTER = "newer libraries, or work that was left out"
# TFLOP/s, GB/s and tokens per second from a time in milliseconds.
PER_MS = {"flops": 1e-9, "bytes": 1e-6, "tokens": 1e3}
# Quantities that templates name.
CARD = ["copy_bandwidth", "stated_bandwidth", "stated_source", "power_limit_w", "cpu_model"]
CARD += ["cpu_usable_cores", "sms", "gpu_count"]


def derive(rows: Rows, results: Results) -> Rows:
    """Ceilings under common names (`measured`, `stated`, `share`), distinguished by `ceiling`."""
    found = select(rows, status="ok", quantity=[*MEASURED, *STATED])
    names = ("matmul, " + found["dtype"]).fillna("copy, read and write")
    sources = found["quantity"].isin(MEASURED).map({True: "measured", False: "stated"})
    named = found.assign(ceiling=names, quantity=sources)
    parts = {name: {"quantity": name} for name in ("measured", "stated")}
    on = ["source", "ceiling"]
    named = combine(named, "share", parts, lambda p: p.measured / p.stated, on=on)
    return pd.concat([rows, named], ignore_index=True)


def by_dtype(results: Results, ceiling: str) -> dict[str, float]:
    """The machine's values of one ceiling, by precision."""
    found = select(results.rows, chapter="machine", quantity=ceiling, status="ok")
    return dict(zip(found["dtype"], found["value"], strict=True)) if len(found) else {}


def ceilings(results: Results, prefix: str = "") -> dict[str, float]:
    """Ceilings, measured or (`stated_`) the vendor's: TFLOP/s by precision, and GB/s as `copy`."""
    bandwidth = f"{prefix}bandwidth" if prefix else "copy_bandwidth"
    copy = results.value(chapter="machine", quantity=bandwidth)
    return by_dtype(results, f"{prefix}matmul_rate") | ({} if copy is None else {"copy": copy})


def with_share(rows: Rows, name: str, results: Results, ceiling: str, rate: str = "rate") -> Rows:
    """Add a chapter's rate as a share of the machine's ceiling for the same precision."""
    peaks = by_dtype(results, ceiling)
    known = {"quantity": rate, "precision": list(peaks)}
    return derived(rows, name, known, lambda found: found.value / found.precision.map(peaks))


def with_rates(rows: Rows, rates: Mapping[str, str], on: Sequence[str], **times: Any) -> Rows:
    """Add rates (work per time) to a chapter's rows; `rates` maps each to its work quantity."""
    for name, work in rates.items():
        parts = {"time": {"quantity": "time", **times}, "work": {"quantity": work}}
        rate = partial(lambda unit, p: unit * p.work / p.time, PER_MS[work])
        rows = combine(rows, name, parts, rate, on=on)
    return rows


# The time of a kernel: by CUDA events, or by wall clock on a CPU.
kernel_time: Any = partial(time, clock=("events", "wall"))


TABLES = {
    "ceilings": Table(
        title="Ceilings: the fastest square matmul and copy of one run, and the vendor's dense "
        "figures",
        rows=["ceiling"],
        columns={
            "measured": quantity("measured"),
            "unit": quantity("measured", "text", "unit"),
            "stated": quantity("stated"),
            "share": quantity("share", "percent"),
        },
    ),
    "card": Table(
        title="The machine card",
        rows=["fact"],
        where={"fact": lambda fact: isinstance(fact, str)},
        data=lambda rows: rows.assign(
            quantity="fact",
            value=[f"{fact:,}" if type(fact) is int else fact for fact in rows["value"]],
        ),
        columns={"value": quantity("fact", "text")},
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Ceilings by name, for the templates of this chapter and of others."""
    return {
        **{name: chapter.value(quantity=name) for name in CARD},
        "matmul": by_dtype(chapter.results, "matmul_rate"),
        "stated": by_dtype(chapter.results, "stated_matmul_rate"),
        "power_capped": any("power_capped" in r.flags for r in chapter.results.of("machine")),
        "bands": list(against_bands(chapter.results, read_bands(REFERENCES / "bands.yaml"))),
    }


@cache
def read_bands(path: Path) -> Mapping[str, Any]:
    return yaml.safe_load(path.read_text())


def against_bands(results: Results, bands: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure with a range for this machine: value, range and, if outside, likely cause."""
    gpu = bands["gpus"].get(results.name, {})
    for name, figure in bands["figures"].items():
        rows = select(results.rows, status="ok", **figure["where"])
        expected = gpu.get(name) or _share_of_stated(results, bands["shares"].get(name))
        if expected is None or len(rows) != 1:
            continue
        (low, high), value = expected, float(rows["value"].iloc[0])
        slow = value < low if figure["unit"] in HIGHER_IS_BETTER else value > high
        flags = rows["flags"].iloc[0] or ()
        cause = _cause(results, flags, figure["bound"], gpu) if slow else WHY_FASTER
        outside = not low <= value <= high
        own = {"value": value, "low": low, "high": high, "outside": outside}
        yield own | {"name": name, "unit": figure["unit"], "cause": cause if outside else ""}


def _share_of_stated(results: Results, share: Mapping[str, Any] | None) -> list[float] | None:
    stated = results.value(chapter="machine", **share["of"]) if share else None
    return [limit * stated for limit in share["range"]] if share and stated else None


def _cause(results: Results, flags: Collection[str], bound: str, gpu: Mapping[str, Any]) -> str:
    """The likeliest reason why a figure is slow, from what the run recorded of the GPU."""
    limit = results.value(chapter="machine", quantity="power_limit_w") or math.inf
    usual = gpu.get("power_limit_w", 0)
    possible = {
        "another process used the GPU": "gpu_shared" in flags,
        "the GPU was throttled by heat or its power supply": "throttled" in flags,
        f"a power limit of {limit:g} W instead of {usual:g} W": limit < usual,
        "the GPU ran into its power limit": "power_capped" in flags,
        "a slow or busy host": bound == "host",
        "lower clocks or another process": True,
    }
    return next(cause for cause, true in possible.items() if true)
