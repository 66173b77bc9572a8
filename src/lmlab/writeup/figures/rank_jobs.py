"""Pictures that the chapters of several ranks share: traces in rows, and memory in stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lmlab.writeup import style
from lmlab.writeup.frames.moments import MOMENTS, PARTS, highest
from lmlab.writeup.frames.rank_jobs import MIB
from lmlab.writeup.numbers import hidden_words, percent

ROWS = {"compute": "computing", "communication": "messages", "copies": "copies"}
ROW_COLOURS = {
    "compute": style.COLOURS[0],
    "communication": style.COLOURS[1],
    "copies": style.COLOURS[4],
}
JOINED_FROM = 1.1
"""A row whose bars are longer than what was recorded by this factor is drawn pale."""
GIB_FROM = 4096.0  # in MiB: larger stacks are drawn in GiB


def overlap(traces: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """One panel a variant on one time axis: what was computed, what was under way."""
    shown = [row for row in ROWS if any(trace["intervals_ms"][row] for _, trace in traces)]
    height = 0.42 + 0.17 * len(shown)
    figure, axes = plt.subplots(
        len(traces), 1, figsize=(style.WIDTH_INCHES, 0.8 + height * len(traces)), sharex=True,
        squeeze=False,
    )  # fmt: skip
    for axis, (label, trace) in zip(axes[:, 0], traces, strict=True):
        _rows(axis, trace, shown)
        axis.set_title(f"{label}: {_share(trace)}", loc="left", fontsize=8.5, pad=2)
    axes[-1, 0].set_xlabel("Time since the step began (ms), under the profiler")
    axes[-1, 0].set_xlim(left=0)
    return figure


def overlap_note(traces: Sequence[Mapping[str, Any]]) -> str:
    """What a message is in these traces, and how far bars may be trusted."""
    kinds = {trace["seen_as"] for trace in traces} - {None}
    if kinds == {"NCCL kernels"}:
        seen = "Messages are NCCL's kernels."
    elif kinds:
        seen = (
            "Messages are gloo's, from the moment they are handed over until their result is "
            "there; one that waits, for its gradients or behind another, counts, and those under "
            "way together are one bar."
        )
    else:
        seen = "The profiler saw no message."
    pale = any(joined(trace, row) for trace in traces for row in ROWS)
    note = f" Pale: bars more than {percent(JOINED_FROM - 1, 2)} longer than what was recorded."
    return (
        f"{seen} Where a row has more stretches than a picture can hold, the shortest of them are "
        "left out and the shortest gaps between them closed; shares are computed from all."
        f"{note if pale else ''}"
    )


def joined(trace: Mapping[str, Any], row: str) -> bool:
    """Whether thinning out has made the bars of a row longer than what was recorded."""
    recorded = trace.get(f"{row}_ms")
    drawn = sum(end - start for start, end in trace["intervals_ms"][row])
    return recorded is not None and drawn > JOINED_FROM * float(recorded)


def _share(trace: Mapping[str, Any]) -> str:
    if trace["overlapped_share"] is None:
        return "no message seen"
    return f"{hidden_words(trace['overlapped_share'])} of its messages behind computation"


def _rows(axis: Axes, trace: Mapping[str, Any], shown: Sequence[str]) -> None:
    for place, row in enumerate(shown):
        bars = [(start, end - start) for start, end in trace["intervals_ms"][row]]
        alpha = 0.4 if joined(trace, row) else 1.0
        axis.broken_barh(
            bars, (place - 0.38, 0.76), facecolors=ROW_COLOURS[row], linewidth=0, alpha=alpha
        )
    axis.set_yticks(range(len(shown)), [ROWS[row] for row in shown])
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def moments(arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """A group of stacks a moment, a stack an arm, parts from the bottom up."""
    figure, (axis,) = style.panels(1, 1, height=3.6)
    width = 0.8 / len(arms)
    largest = max(
        highest(arm["ranks"], moment)["allocated_bytes"] / MIB
        for arm in arms.values()
        for moment in MOMENTS
    )
    unit, divisor = ("GiB", 1024 * MIB) if largest > GIB_FROM else ("MiB", MIB)
    ticks: list[tuple[float, str]] = []
    for group, moment in enumerate(MOMENTS):
        for place, arm in enumerate(arms.values()):
            x = group + (place - (len(arms) - 1) / 2) * width
            _stack(axis, highest(arm["ranks"], moment), x, 0.88 * width, divisor)
            ticks.append((x, chr(ord("A") + place)))
    axis.set_xticks([x for x, _ in ticks], [letter for _, letter in ticks])
    for group, words in enumerate(MOMENTS.values()):
        axis.text(group, -0.13, words, ha="center", va="top", transform=axis.get_xaxis_transform())
    axis.set_ylabel(f"Memory of the fullest rank ({unit})")
    axis.set_title("What a rank holds, moment by moment")
    axis.margins(y=0.06)
    axis.grid(axis="x", visible=False)
    _legend(figure, list(arms), labels)
    return figure


def _stack(axis: Axes, reading: Mapping[str, Any], x: float, width: float, divisor: float) -> None:
    bottom = 0.0
    for index, part in enumerate(PARTS):
        value = max(reading["parts_bytes"][part], 0) / divisor
        (bar,) = axis.bar(x, value, width, bottom=bottom, **_look(index)).patches
        bar.sticky_edges.y[:] = [0.0]  # room above the highest stack
        bottom += value


def _look(index: int) -> dict[str, Any]:
    return {
        "facecolor": style.COLOURS[index if index != 2 else 5],
        "hatch": style.HATCHES[index],
        "edgecolor": "white",
        "linewidth": 0.3,
    }


def _legend(figure: Figure, names: Sequence[str], labels: Mapping[str, str]) -> None:
    parts = [Patch(label=words, **_look(index)) for index, words in enumerate(PARTS.values())]
    letters = [
        Patch(label=f"{chr(ord('A') + place)}: {labels[name]}", alpha=0)
        for place, name in enumerate(names)
    ]
    letters += [Patch(label=" ", alpha=0)] * (len(parts) - len(letters))
    # Filled column by column: parts above, arms below.
    handles = [patch for pair in zip(parts, letters, strict=True) for patch in pair]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(parts), handlelength=1.4)
