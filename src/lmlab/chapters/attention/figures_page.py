"""Figures: speed of the variants relative to the fastest, and those of the topics."""

from typing import Any

from lmlab.chapters.attention import naive_page, tiles_page
from lmlab.chapters.attention.names import COMPILED, CUDNN, FA4, NAIVE, NAMES, OURS
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, at_first, select

# Drawn in figures, each in its own color.
DRAWN = (NAIVE, COMPILED, "sdpa_flash", CUDNN, "flex", OURS, FA4)


def consistent(flags: Any) -> bool:
    """Whether a time may take part in comparisons."""
    return "inconsistent" not in flags


def relative_speed(results: Results, topic: str) -> Rows:
    """Speed relative to the fastest of all variants, forward and backward, in bf16 if measured."""
    rows = select(results.rows, topic=topic, quantity="time", phase="both", status="ok")
    rows = select(rows, flags=consistent)
    if "bf16" in set(rows["precision"]):
        rows = select(rows, precision="bf16")
    return rows.assign(value=rows.groupby("source")["value"].transform("min") / rows["value"])


def race(results: Results) -> Rows:
    """A few variants over one head."""
    rows = relative_speed(results, "benchmark")
    sdpa = CUDNN if CUDNN in set(rows["variant"]) else "sdpa_flash"
    panel = [f"{p}, head dim {d}" for p, d in zip(rows["precision"], rows["head_dim"], strict=True)]
    # A user's own variant has no name there, and is drawn.
    left_out = {*NAMES} - {name for name in DRAWN if name == sdpa or not name.startswith("sdpa")}
    return select(rows.assign(panel=panel), variant=lambda name: name not in left_out)


def shape_race(results: Results) -> Rows:
    """The variants at the models' shapes, at the first batch of the study."""
    rows = at_first(relative_speed(results, "shapes"), "batch")
    return rows.assign(panel=rows["size"] + ", " + rows["precision"])


RELATIVE: Any = {
    "facet": "panel",
    "color": "attention",
    "names": {name: name for name in (NAMES.get(each, each) for each in DRAWN)},
    "y": Axis("speed relative to the fastest"),
}
FIGURES = {
    **naive_page.FIGURES,
    **tiles_page.FIGURES,
    "race": Figure(
        title="Speed relative to the fastest variant, forward and backward, causal, one head",
        x=Axis(field="sequence", title="sequence", log=2),
        data=race,
        **RELATIVE,
    ),
    "shapes": Figure(
        title="Speed relative to the fastest variant at the models' shapes, forward and backward",
        x=Axis(field="context", title="context", log=2),
        data=shape_race,
        **RELATIVE,
    ),
}
