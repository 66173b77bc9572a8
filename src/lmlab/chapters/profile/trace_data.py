"""Turn a trace from either profiler into a profile's records and data. No torch.

The trace has one range per mode, which contains one run and its phases. On a CPU an operator
that does work counts as a kernel. Records, with the label `mode` unless noted:

- per phase and for the whole run: `total_time` (sum over kernels), `busy_time` (their union),
  `span_time` (first start to last end), `kernels`, `host_time` (the host in the phase's range)
- per family: `family_total_time`, `family_instances`
- per kernel: `kernel_total_time`, `kernel_instances` of the top kernels by rank, of the largest
  non-matmul kernels, and of copies and fills, which have no rank
- idle device: `gap_time`, `host_late_gap_time` (next kernel not launched yet), `gaps`
- host: `wait_time`, `launches`, `launch_time` (mean), `delay_median_time` and `delay_max_time` from
  a launch to the start of its kernel
- per part of attention, forward without gradient (no mode): `part_total_time`, `part_kernels`,
  `part_product_time` (the matmul kernels only, without any copies of their operands)
- `profiler_version` (no mode)

`data` has everything larger: per mode the kernel table and the host's calls; `attention_parts` with
their kernels; `timeline`, the phases of the train step (or of the largest mode that fit); `layer`,
every kernel of one layer of its forward pass. Kernels are indices into `names`, so that each long
name is stored once.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.measure.records import Record, value, values
from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import (
    device_times,
    host_calls,
    host_side,
    is_copy,
    kernel_summary,
    one_layer,
    section,
    timeline,
    within,
)
from lmlab.measure.trace.frames import Trace, TraceError
from lmlab.measure.trace.kernel_names import MATMULS, family, shorten
from lmlab.study.results import read

PHASES_OF_MODE = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}
TOTAL = "total"
ATTENTION = "attention"
RANGES_IN_ATTENTION = ("scores", "softmax", "output")
TABLE_ROWS = 80
NAMES_PER_PART = 6
TOP_KERNELS, TOP_OTHER_KERNELS = 10, 5
COPIES = "copies and fills"

Reduced = tuple[list[Record], dict[str, Any]]
"""What a trace adds to a result: records and data."""


def mode_range(mode: str) -> str:
    """Name of the range around a mode's run; a phase may have the same name as a mode."""
    return f"mode {mode}"


def complete(measured: Path, export: Path, out: Path) -> str:
    """Merge what the process measured with the nsys report, write the result, and return its
    headline. A point without numbers has no report and is written as it is."""
    result = read(measured)
    if result.status == "ok":
        records, data = of_trace(nsys.read(export))
        result = replace(
            result, measurements=(*result.measurements, *records), data={**result.data, **data}
        )
    result.write(out)
    return result.headline()


def of_trace(trace: Trace) -> Reduced:
    """Records and data of a trace: numbers as records, everything larger as data. Raises
    `TraceError` if a run has no kernels."""
    recorded = [mode for mode in PHASES_OF_MODE if mode_range(mode) in set(trace.ranges["name"])]
    runs = {mode: section(trace, mode_range(mode)) for mode in recorded or PHASES_OF_MODE}
    for mode, run in runs.items():
        if run.kernels.empty:
            raise TraceError(f"trace: {trace.tool} recorded no kernels in {mode_range(mode)!r}")
    records = [value("profiler_version", trace.tool, "")]
    for mode, run in runs.items():
        records += _mode_records(mode, run)
    parts = attention_parts(runs[recorded[0]])
    for part in parts:
        records += values(part, "part_", part=part["part"])
    numbers: dict[str, int] = defaultdict(count().__next__)

    def numbered(columns: Any, key: str = "name") -> dict[str, Any]:
        return {**columns, key: [numbers[name] for name in columns[key]]}

    def tables(run: Trace) -> dict[str, Any]:
        table = kernel_summary(run.kernels).head(TABLE_ROWS).round(1)
        return {"table": numbered(table.to_dict("list")), "calls": host_calls(run)}

    last = recorded[-1]
    layer = one_layer(runs[last], "forward", RANGES_IN_ATTENTION)
    data: dict[str, Any] = {
        "modes": {mode: tables(run) for mode, run in runs.items()},
        "attention_parts": [numbered(part, "names") for part in parts],
        "timeline": timeline(runs[last], PHASES_OF_MODE[last]),
        "layer": numbered(layer) if layer else None,
    }
    data["names"] = [
        {"name": name, "short_name": shorten(name), "family": family(name)} for name in numbers
    ]
    return records, data


def attention_parts(run: Trace) -> list[dict[str, Any]]:
    """Split attention into its two matmuls and two parts between them; empty for an attention
    that is not written as matmul, softmax, matmul."""
    kernels = within(run.kernels, ATTENTION)
    scores, between, output = (within(kernels, name) for name in RANGES_IN_ATTENTION)
    if scores.empty or output.empty:
        return []
    is_softmax = between["family"] == "softmax"
    parts = {
        "scores": scores,
        "scale_and_mask": between[~is_softmax],
        "softmax": between[is_softmax],
        "output": output,
    }
    return [
        {
            "part": name,
            "kernels": len(rows),
            "total_ns": int(rows["duration_ns"].sum()),
            "product_ns": int(rows["duration_ns"][rows["family"].isin(MATMULS)].sum()),
            "names": kernel_summary(rows)["name"].head(NAMES_PER_PART).tolist(),
        }
        for name, rows in parts.items()
    ]


def _mode_records(mode: str, run: Trace) -> Iterator[Record]:
    phases = {phase: within(run.kernels, phase) for phase in PHASES_OF_MODE[mode]}
    for phase, kernels in {**phases, TOTAL: run.kernels}.items():
        own = run.ranges["name"].isin(phases if phase == TOTAL else [phase])
        host_ns = int(run.ranges["duration_ns"][own].sum())
        yield from values({**device_times(kernels), "host_ns": host_ns}, mode=mode, phase=phase)
    durations = run.kernels.groupby("family", observed=True)["duration_ns"]
    families: Any = durations.agg(total_ns="sum", instances="size")
    for name, times in families.to_dict("index").items():
        yield from values(times, "family_", mode=mode, family=str(name))
    for row in _top_kernels(kernel_summary(run.kernels)).to_dict("records"):
        labels = {"kernel": shorten(row["name"]), "family": row["family"], "rank": row["rank"]}
        times = {key: row[key] for key in ("total_ns", "instances")}
        yield from values(times, "kernel_", mode=mode, **labels)
    copies = run.kernels["duration_ns"][is_copy(run.kernels)]
    if len(copies):
        times = {"total_ns": int(copies.sum()), "instances": len(copies)}
        yield from values(times, "kernel_", mode=mode, kernel=COPIES, family="copy")
    yield from values(host_side(run), mode=mode)


def _top_kernels(summary: pd.DataFrame) -> pd.DataFrame:
    """The kernels worth a record, with rank and family."""
    families = summary["name"].map(family)
    ranked = summary.assign(rank=range(1, len(summary) + 1), family=families)
    others = ranked[~families.isin(MATMULS)].head(TOP_OTHER_KERNELS)
    return pd.concat([ranked.head(TOP_KERNELS), others]).drop_duplicates("rank")
