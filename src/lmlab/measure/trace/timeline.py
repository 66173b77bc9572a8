"""A run's timeline in few numbers: enough to draw what a profiler's screenshot would show.

A train step has ten thousand kernels and a figure a thousand columns. Time is therefore cut into
bins, and for each family the share of each bin in which it ran is stored, in thousandths: nothing
is left out, and a short kernel between long ones shows as a thin mark. Of one layer in the middle
of the model every kernel is stored, for a figure that shows single kernels.

All times count from the opening of the run's range on the host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace.digest import Names
from lmlab.measure.trace.frames import Integers, Trace
from lmlab.measure.trace.summary import records, within

BINS = 400
MAX_KERNELS_OF_LAYER = 200

_LAYER = re.compile(r".*\.\d+")


def timeline(run: Trace, phases: Sequence[str]) -> dict[str, Any] | None:
    """Phases on host and device, and the families over time; None without kernels."""
    if run.kernels.empty:
        return None
    # The run's own range opens before anything in it.
    origin = int(pd.concat([run.kernels["start_ns"], run.ranges["start_ns"]]).min())
    ends = run.kernels["start_ns"] + run.kernels["duration_ns"]
    end = max(int(ends.max()) - origin, 1)
    edges = np.linspace(0, end, BINS + 1)
    return {
        "end_ns": end,
        "bins": BINS,
        "host_phases": _host_phases(run, phases, origin),
        "device_phases": _device_phases(run, phases, origin),
        "families": {
            str(family): _thousandths(rows, edges, origin)
            for family, rows in run.kernels.groupby("family", observed=True)
        },
    }


def one_layer(run: Trace, phase: str, parts: Sequence[str], names: Names) -> dict[str, Any] | None:
    """Every kernel of the middle layer in a phase; None if no layer is marked."""
    kernels = within(run.kernels, phase)
    in_order = (name for path in kernels["ranges"] for name in path if _LAYER.fullmatch(name))
    layers = list(dict.fromkeys(in_order))
    if not layers:
        return None
    layer = layers[len(layers) // 2]
    rows = within(kernels, layer).head(MAX_KERNELS_OF_LAYER)
    return {
        "layer": layer,
        "start_ns": (rows["start_ns"] - rows["start_ns"].min()).tolist(),
        "duration_ns": rows["duration_ns"].tolist(),
        "name": names.add_all(rows),
        "part": [next((name for name in path if name in parts), None) for path in rows["ranges"]],
    }


def _host_phases(run: Trace, phases: Sequence[str], origin: int) -> list[dict[str, Any]]:
    rows = run.ranges[run.ranges["name"].isin(phases)]
    table = rows.assign(phase=rows["name"].astype(str), start_ns=rows["start_ns"] - origin)
    return records(table[["phase", "start_ns", "duration_ns"]])


def _device_phases(run: Trace, phases: Sequence[str], origin: int) -> list[dict[str, Any]]:
    """From the first kernel of each phase to its last; none for a phase without kernels."""
    found = []
    for phase in phases:
        rows = within(run.kernels, phase)
        if len(rows):
            start = int(rows["start_ns"].min())
            last = int((rows["start_ns"] + rows["duration_ns"]).max())
            found.append({"phase": phase, "start_ns": start - origin, "duration_ns": last - start})
    return found


def _thousandths(rows: pd.DataFrame, edges: npt.NDArray[np.float64], origin: int) -> list[int]:
    """The share of each bin in which any of these kernels ran."""
    starts = rows["start_ns"].to_numpy() - origin
    busy = busy_until(starts, starts + rows["duration_ns"].to_numpy(), edges)
    shares: list[int] = np.rint(1000 * np.diff(busy) / np.diff(edges)).astype(int).tolist()
    return shares


def busy_until(
    starts: Integers, ends: Integers, moments: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Time before each moment in which at least one interval ran."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reached = np.maximum.accumulate(ends[order])
    # An interval adds only what extends beyond all that began before it.
    begins = np.maximum(starts, np.concatenate(([starts[0]], reached[:-1])))
    lengths = np.maximum(reached - begins, 0)
    done = np.concatenate(([0], np.cumsum(lengths)))
    row = np.searchsorted(begins, moments, side="right")
    inside = np.where(row > 0, np.minimum(moments - begins[row - 1], lengths[row - 1]), 0.0)
    busy: npt.NDArray[np.float64] = done[np.maximum(row - 1, 0)] + inside
    return busy
