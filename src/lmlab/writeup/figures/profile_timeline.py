"""The timeline of one train step: who did what when, on the host and on the device.

The upper panel is the whole step. Its first two lanes are the phases, as the host went through them
and as the device did; below, a lane a family, filled as high as the share of each moment in which
a kernel of that family ran. The lower panel is one layer of the forward pass, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.pyplot import figure as new_figure

from lmlab.study.results import Result
from lmlab.writeup import profile_words as words
from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.tables.profile_rows import kernel_word, recorded

Looks = Mapping[str, tuple[str, str]]

PHASE_COLOURS = {
    "zero_grad": "#BBBBBB",
    "forward": "#7FB3D5",
    "backward": "#F5B971",
    "optimizer": "#CC9FBF",
}
LANE = 0.86
LONG_LAYER_NS = 10_000_000
STEPS_OF_A_LANE = 40
# A phase narrower than this share of the picture has no room for its name.
NARROWEST_NAME = 0.07
# Names of attention's parts, and how high they stand: the middle one is long.
PART_LABELS = {
    "scores": ("scores", 0.78),
    "softmax": ("scale, mask, softmax", 1.2),
    "output": ("output", 0.78),
}


def timelines(collected: Collected, looks: Looks) -> dict[str, Drawing]:
    """One figure a size, at the largest context that it was recorded at."""
    found = frames.results_at_largest_context(collected)
    return {
        f"timeline_{size}": _timeline(collected, result, looks) for size, result in found.items()
    }


def _timeline(collected: Collected, result: Result, looks: Looks) -> Drawing:
    context = result.parameters["context"]
    size = result.parameters["size"]
    one = kernel_word(collected)
    some = "a kernel" if collected.device == "cuda" else "an operator"
    note = recorded([result], collected)
    waiting = (
        " The host is in a phase while it waits within the phase's launches, too."
        if collected.device == "cuda"
        else ""
    )
    return Drawing(
        alt=f"Timeline of one train step of {size} at context {context}: phases over {one} "
        "families, and one layer of its forward pass",
        caption=f"One train step of {size} at context {context}. A lane is as high as the share of "
        f"the moment in which {some} of the family ran.{waiting} Below, one layer of the forward "
        f"pass, {one} by {one}. {note}",
        draw=lambda: _draw(result.data, looks, str(size), int(context), collected.device),
    )


def _draw(data: Mapping[str, Any], looks: Looks, size: str, context: int, device: str) -> Figure:
    line, layer = data["timeline"], data["layer"]
    lanes = [family for family in words.FAMILIES if family in line["families"]]
    heights = [0.27 * (len(lanes) + 2) + 0.3, 1.25] if layer else [0.27 * (len(lanes) + 2) + 0.3]
    drawn = new_figure(figsize=(style.WIDTH_INCHES, sum(heights) + 1.0))
    grid = GridSpec(len(heights), 1, figure=drawn, height_ratios=heights)
    step = drawn.add_subplot(grid[0])
    _step(step, line, lanes, looks, device)
    step.set_title(f"One train step: {size}, context {context}")
    if layer:
        below = drawn.add_subplot(grid[1])
        _layer(below, layer, data["names"], looks, device)
        below.set_title(f"Forward of {layer['layer']}")
    return drawn


def _step(axis: Axes, line: Mapping[str, Any], lanes: list[str], looks: Looks, device: str) -> None:
    end_ms = line["end_ns"] / 1e6
    # A CPU is host and device in one: its phases have one lane.
    phases = {"phase on the GPU": "device_phases", "phase on the host": "host_phases"}
    if device == "cpu":
        phases = {"phase": "host_phases"}
    for row, key in enumerate(phases.values(), start=len(lanes)):
        _phases(axis, line[key], row, end_ms)
    edges = np.linspace(0, end_ms, line["bins"] + 1)
    for row, family in enumerate(reversed(lanes)):
        _lane(axis, edges, line["families"][family], row, looks[family])
    names = [words.FAMILY_NAMES.get(family, family) for family in reversed(lanes)]
    axis.set_yticks(range(len(lanes) + len(phases)), [*names, *phases])
    axis.set_ylim(-0.6, len(lanes) + len(phases) - 0.4)
    axis.set_xlim(0, end_ms)
    axis.set_xlabel("Time since the step began (ms)")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _phases(axis: Axes, phases: list[dict[str, Any]], row: int, end_ms: float) -> None:
    for phase in phases:
        start, length = phase["start_ns"] / 1e6, phase["duration_ns"] / 1e6
        length = min(length, end_ms - start)
        if length <= 0:
            continue
        colour = PHASE_COLOURS.get(phase["phase"], style.GUIDE)
        axis.barh(row, length, LANE, start, color=colour, edgecolor="white", linewidth=0.5)
        if length >= NARROWEST_NAME * end_ms:
            axis.text(start + length / 2, row, phase["phase"], ha="center", va="center", fontsize=8)


def _lane(axis: Axes, edges: Any, thousandths: list[int], row: int, look: tuple[str, str]) -> None:
    """A family's share of each moment, standing on the floor of its lane."""
    floor = row - LANE / 2
    axis.axhspan(floor, row + LANE / 2, color="#F4F4F4", zorder=0, linewidth=0)
    starts, shares = _runs(thousandths)
    heights = floor + LANE * np.append(shares, 0.0)
    at = edges[np.append(starts, len(thousandths))]
    axis.fill_between(at, heights, floor, step="post", color=look[0], linewidth=0)


def _runs(thousandths: list[int]) -> tuple[Any, Any]:
    """First bins of runs that look the same, and their shares: a picture needs no finer steps."""
    shares = np.round(np.array(thousandths) / 1000 * STEPS_OF_A_LANE) / STEPS_OF_A_LANE
    starts = np.flatnonzero(np.append(True, np.diff(shares) != 0))
    return starts, shares[starts]


def _layer(
    axis: Axes,
    layer: Mapping[str, Any],
    names: list[dict[str, str]],
    looks: Looks,
    device: str,
) -> None:
    """Each kernel as a bar of its length; parts of attention are bracketed above."""
    one = "kernel" if device == "cuda" else "operator"
    longest = max(layer["start_ns"]) >= LONG_LAYER_NS
    unit, scale = ("ms", 1e6) if longest else ("µs", 1e3)
    starts = np.array(layer["start_ns"]) / scale
    lengths = np.array(layer["duration_ns"]) / scale
    end = float((starts + lengths).max())
    for start, length, index in zip(starts, lengths, layer["name"], strict=True):
        colour, hatch = looks[names[index]["family"]]
        axis.barh(
            0, length, LANE, start, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3
        )
    _part_brackets(axis, layer, starts, lengths, end)
    axis.set_yticks([0], [f"{one}s by family"])
    axis.set_ylim(-0.6, 1.75)
    axis.set_xlim(0, end)
    axis.set_xlabel(f"Time since the layer's first {one} ({unit})")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _part_brackets(
    axis: Axes, layer: Mapping[str, Any], starts: Any, lengths: Any, end: float
) -> None:
    """A line over each part, and its name; neighbours' names stand at different heights."""
    for part, (label, height) in PART_LABELS.items():
        rows = [row for row, name in enumerate(layer["part"]) if name == part]
        if rows:
            left, right = starts[rows[0]], starts[rows[-1]] + lengths[rows[-1]]
            inset = min(0.002 * end, (right - left) / 4)
            axis.plot([left + inset, right - inset], [0.62, 0.62], color="black", linewidth=1.2)
            middle = (left + right) / 2
            axis.plot([middle, middle], [0.62, height], color="black", linewidth=0.6)
            axis.text(middle, height + 0.04, label, ha="center", va="bottom", fontsize=7.5)
