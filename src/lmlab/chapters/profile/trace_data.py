"""From a trace to a profile's records and data, whichever profiler recorded it. No torch.

The trace has one range per mode, which contains one run and its phases. On a CPU an operator
that does work counts as a kernel. Records, with the label `mode` unless noted:

- per phase and for the whole run: `total_time` (sum over kernels), `busy_time` (their union),
  `span_time` (first start to last end), `kernels`, `host_time` (the host in the phase's range)
- per family: `family_total_time`, `family_instances`
- per kernel: `kernel_total_time`, `kernel_instances` of the first by rank, of the largest
  non-matmul kernels, and of the copy engines, which have no rank
- idle device: `gap_time`, `host_late_gap_time` (next kernel not launched yet), `gaps`
- host: `wait_time`, `launches`, `launch_time` (mean), `delay_median_time` and `delay_max_time` from
  a launch to the start of its kernel
- per part of attention, forward without gradient (no mode): `part_total_time`, `part_kernels`,
  `part_product_time` (of it in matmuls, which may have to copy their operands first)
- `profiler_version` (no mode)

`data` has what is larger: per mode the kernel table and the host's calls; `attention_parts` with
their kernels; `timeline`, the phases of the train step (of the largest mode that fitted); `layer`,
every kernel of one layer of its forward pass. Kernels are indices into `names`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.measure.records import Label, Record, value, values
from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import (
    Names,
    digest,
    kernel_summary,
    one_layer,
    section,
    timeline,
    within,
)
from lmlab.measure.trace.frames import Trace, TraceError
from lmlab.measure.trace.kernel_names import MATMULS
from lmlab.study.results import read

PHASES_OF_MODE = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}
TOTAL = "total"
ATTENTION = "attention"
RANGES_IN_ATTENTION = ("scores", "softmax", "output")
NAMES_PER_PART = 6
TOP_KERNELS, TOP_OTHER_KERNELS = 10, 5
COPIES = "copies and fills"
PAYLOAD = ("table", "rest", "host")

Reduced = tuple[list[Record], dict[str, Any]]
"""What a trace adds to a result: records and data."""


def mode_range(mode: str) -> str:
    """Name of the range around a mode's run; a phase may have the same name as a mode."""
    return f"mode {mode}"


def complete(measured: Path, export: Path, out: Path) -> str:
    """Write the result of a point that nsys recorded: what the process measured and the report
    adds. A point without numbers has no report and is complete as it is. Returns its headline."""
    result = read(measured)
    if result.status == "ok":
        records, data = of_trace(nsys.read(export))
        result = replace(
            result, measurements=(*result.measurements, *records), data={**result.data, **data}
        )
    result.write(out)
    return result.headline()


def of_trace(trace: Trace) -> Reduced:
    """Records and data of a trace: numbers as records, everything larger as data. A `TraceError` if
    one of its runs has no kernels."""
    names = Names()
    recorded = [mode for mode in PHASES_OF_MODE if mode_range(mode) in set(trace.ranges["name"])]
    runs = {mode: section(trace, mode_range(mode)) for mode in recorded or PHASES_OF_MODE}
    for mode, run in runs.items():
        if run.kernels.empty:
            raise TraceError(f"trace: {trace.tool} recorded no kernels in {mode_range(mode)!r}")
    modes = {mode: digest(run, PHASES_OF_MODE[mode], names) for mode, run in runs.items()}
    last = recorded[-1]
    data: dict[str, Any] = {
        "modes": {mode: {key: run[key] for key in PAYLOAD} for mode, run in modes.items()},
        "attention_parts": attention_parts(runs["forward"], names),
        "timeline": timeline(runs[last], PHASES_OF_MODE[last]),
        "layer": one_layer(runs[last], "forward", RANGES_IN_ATTENTION, names),
        "names": names.rows(),
    }
    records = [value("profiler_version", trace.tool, "")]
    for mode, found in modes.items():
        records += _mode_records(mode, found, data["names"])
    for part in data["attention_parts"] or ():
        records += values(part, "part_", part=part["part"])
    return records, data


def attention_parts(run: Trace, names: Names) -> list[dict[str, Any]] | None:
    """Attention split at its operations, with two parts between the matmuls; None for an
    attention that is not written as matmul, softmax, matmul."""
    kernels = within(run.kernels, ATTENTION)
    scores, between, output = (within(kernels, name) for name in RANGES_IN_ATTENTION)
    if scores.empty or output.empty:
        return None
    is_softmax = between["family"] == "softmax"
    parts = {
        "scores": scores,
        "scale_and_mask": between[~is_softmax],
        "softmax": between[is_softmax],
        "output": output,
    }
    return [_part(name, rows, names) for name, rows in parts.items()]


def _part(name: str, kernels: pd.DataFrame, names: Names) -> dict[str, Any]:
    summary = kernel_summary(kernels).head(NAMES_PER_PART)
    return {
        "part": name,
        "kernels": len(kernels),
        "total_ns": int(kernels["duration_ns"].sum()),
        "product_ns": int(kernels["duration_ns"][kernels["family"].isin(MATMULS)].sum()),
        "names": names.add_all(summary),
    }


def _mode_records(
    mode: str, run: Mapping[str, Any], names: list[dict[str, str]]
) -> Iterator[Record]:
    host_ns = sum(phase["host_ns"] for phase in run["phases"])
    for phase in (*run["phases"], {**run, "phase": TOTAL, "host_ns": host_ns}):
        yield from values(phase, mode=mode, phase=phase["phase"])
    for family, times in run["families"].items():
        yield from values(times, "family_", mode=mode, family=family)
    for times, labels in _top_kernels(run, names):
        yield from values(times, "kernel_", mode=mode, **labels)
    # The mean time of the host in a kernel launch, by whichever API call.
    launches = [call for call in run["host"]["calls"] if "Launch" in call["name"]]
    calls = sum(call["calls"] for call in launches)
    mean_ns = sum(call["total_ns"] for call in launches) / calls if calls else None
    yield from values({**run["host"], "launch_ns": mean_ns}, mode=mode)


def _top_kernels(
    run: Mapping[str, Any], names: list[dict[str, str]]
) -> Iterator[tuple[dict[str, int], dict[str, Label]]]:
    """Totals and labels of the kernels worth a record."""
    table, others = run["table"], 0
    rows = zip(table["name"], table["total_ns"], table["instances"], strict=True)
    for rank, (index, total_ns, instances) in enumerate(rows, 1):
        family = names[index]["family"]
        others += family not in MATMULS
        if rank <= TOP_KERNELS or (family not in MATMULS and others <= TOP_OTHER_KERNELS):
            labels = {"kernel": names[index]["short_name"], "family": family, "rank": rank}
            yield {"total_ns": total_ns, "instances": instances}, labels
    if run["copies"]["instances"]:
        yield run["copies"], {"kernel": COPIES, "family": "copy"}
