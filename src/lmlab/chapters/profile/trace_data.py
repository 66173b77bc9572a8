"""From a trace to the data of a profile's result, whichever profiler recorded it. No torch.

The trace holds three runs, each in the range of its mode, its phases inside. What comes of it:

`tool`; `names` (kernel names whole, short, and their family); `modes`, each mode's digest (see
`measure.trace.digest`); `attention_parts` of the forward pass without gradient, rows of part,
kernels, total_ns, product_ns (of it in matrix products: a product may have to copy its operands
first) and names of its kernels, longest first, or null where the attention has no parts;
`slow_ranges`; `timeline` of the train step and `layer`, one layer of its forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import Names, digest, section, slow_ranges
from lmlab.measure.trace.families import MATMULS
from lmlab.measure.trace.frames import Trace, TraceError
from lmlab.measure.trace.summary import kernel_summary, within
from lmlab.measure.trace.timeline import one_layer, timeline

PHASES_OF_MODE = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}
ATTENTION = "attention"
RANGES_IN_ATTENTION = ("scores", "softmax", "output")
NAMES_OF_A_PART = 6


def mode_range(mode: str) -> str:
    """Name of the range around a mode's run; a phase may be called as a mode is."""
    return f"mode {mode}"


def of_export(path: Path) -> dict[str, Any]:
    """The data of a trace that nsys recorded."""
    return of_trace(nsys.read(path))


def of_trace(trace: Trace) -> dict[str, Any]:
    """The data of a trace; a `TraceError` if one of its runs has no kernels."""
    names = Names()
    runs = {mode: section(trace, mode_range(mode)) for mode in PHASES_OF_MODE}
    for mode, run in runs.items():
        if run.kernels.empty:
            raise TraceError(f"trace: {trace.tool} recorded no kernels in {mode_range(mode)!r}")
    step = runs["train_step"]
    return {
        "tool": trace.tool,
        "modes": {mode: digest(run, PHASES_OF_MODE[mode], names) for mode, run in runs.items()},
        "attention_parts": attention_parts(runs["forward"], names),
        "slow_ranges": slow_ranges(trace, [mode_range(mode) for mode in runs]),
        "timeline": timeline(step, PHASES_OF_MODE["train_step"]),
        "layer": one_layer(step, "forward", RANGES_IN_ATTENTION, names),
        "names": names.rows(),
    }


def attention_parts(run: Trace, names: Names) -> list[dict[str, Any]] | None:
    """Attention cut where its operations are; what lies between the products is two parts."""
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
    summary = kernel_summary(kernels).head(NAMES_OF_A_PART)
    return {
        "part": name,
        "kernels": len(kernels),
        "total_ns": int(kernels["duration_ns"].sum()),
        "product_ns": int(kernels["duration_ns"][kernels["family"].isin(MATMULS)].sum()),
        "names": names.add_all(summary),
    }
