"""Figures of the profile chapter: shares of families, attention's parts, timelines of steps."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lmlab.writeup import profile_words as words
from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures.profile_timeline import timelines
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.tables.profile_rows import recorded

# Families keep their look in every figure; a hatch tells neighbours apart in grey.
LOOKS = {
    "matmul_tensor_core": ("#0072B2", ""),
    "matmul_simt": ("#56B4E9", ""),
    "matmul": ("#56B4E9", "///"),
    "softmax": ("#D55E00", ""),
    "elementwise": ("#E69F00", ""),
    "reduction": ("#009E73", ""),
    "copy": ("#7F7F7F", ""),
    "communication": ("#000000", ""),
    "optimizer": ("#CC79A7", ""),
    "other": ("#C8C8C8", "..."),
}
# Colours on which black cannot be read.
DARK = ("#0072B2", "#000000")
SMALLEST_LABEL = 0.055


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name; a timeline a size."""
    shares = frames.first_kind(frames.families(collected))
    parts = frames.first_kind(frames.parts(collected))
    note = recorded(collected.results, collected)
    return {
        "families": Drawing(
            alt="Share of kernel families in forward, forward and backward, and train step, a "
            "stacked bar a size",
            caption="What the device's time is spent on, at the smallest and the largest context "
            f"of the study. {note}",
            draw=(lambda: _families(shares)) if len(shares) else None,
        ),
        "attention": Drawing(
            alt="Time of attention's parts against context length, a panel a size",
            caption="Attention in one forward pass, all layers together; both axes are "
            f"logarithmic. {note}",
            draw=(lambda: _attention(parts)) if len(parts) else None,
        ),
        **timelines(collected, LOOKS),
    }


def _families(shares: pd.DataFrame) -> Figure:
    """Rows of panels are the smallest and the largest context, columns the modes."""
    contexts = sorted(set(shares["context"]))
    contexts = [contexts[0], contexts[-1]] if len(contexts) > 1 else contexts
    figure, axes = style.panels(
        len(contexts), len(words.MODES), height=2.7, sharex=True, sharey=True
    )
    cases = [(context, mode) for context in contexts for mode in words.MODES]
    for axis, (context, mode) in zip(axes, cases, strict=True):
        _stack(axis, frames.of(shares, context=context, mode=mode), frames.order(shares, "size"))
        axis.set_title(f"{words.MODE_NAMES[mode].capitalize()}, context {context}")
        axis.set_ylim(0, 100)
        axis.grid(axis="x", visible=False)
    for axis in axes[:: len(words.MODES)]:
        axis.set_ylabel("Share of device time (%)")
    _family_legend(figure, shares)
    return figure


def _stack(axis: Axes, shares: pd.DataFrame, sizes: list[Any]) -> None:
    bottom = dict.fromkeys(sizes, 0.0)
    for family in words.FAMILIES:
        for position, size in enumerate(sizes):
            share = float(frames.of(shares, family=family, size=size)["share"].sum())
            _block(axis, position, bottom[size], share, family)
            bottom[size] += share
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def _block(axis: Axes, position: int, bottom: float, share: float, family: str) -> None:
    """One family of one bar, its share written into it where there is room."""
    if not share:
        return
    colour, hatch = LOOKS[family]
    axis.bar(
        position, 100 * share, 0.8, 100 * bottom,
        color=colour, hatch=hatch, edgecolor="white", linewidth=0.5,
    )  # fmt: skip
    if share >= SMALLEST_LABEL:
        axis.text(
            position, 100 * (bottom + share / 2), f"{100 * share:.0f}",
            ha="center", va="center", fontsize=7.5, color="white" if colour in DARK else "black",
        )  # fmt: skip


def _family_legend(figure: Figure, shares: pd.DataFrame) -> None:
    there = set(shares["family"])
    handles = [
        Patch(
            facecolor=LOOKS[family][0],
            hatch=LOOKS[family][1],
            edgecolor="white",
            label=words.FAMILY_NAMES.get(family, family),
        )
        for family in words.FAMILIES
        if family in there
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def _attention(parts: pd.DataFrame) -> Figure:
    sizes = frames.order(parts, "size")
    columns = min(len(sizes), 5)
    lines = -(-len(sizes) // columns)
    figure, axes = style.panels(lines, columns, height=2.7, sharex=True, sharey=True)
    contexts = sorted(set(parts["context"]))
    for axis, size in zip(axes, sizes, strict=False):
        for index, part in enumerate(words.PARTS):
            rows = frames.of(parts, size=size, part=part).sort_values("context")
            label = words.part_title(part)
            axis.plot(rows["context"], rows["total_ms"], label=label, **style.series(index))
        axis.set_title(str(size))
        style.log_axis(axis, "x", ticks=contexts)
        axis.set_xticks(contexts, [str(context) for context in contexts], rotation=45)
        axis.set_xlabel("Context (tokens)")
    for axis in axes[len(sizes) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("Time in a forward pass (ms)")
    style.log_axis(axes[0], "y")
    style.legend_below(figure, axes[0], title="Part of attention")
    return figure
