"""Rows and captions that the profile chapter's tables share.

A row is a point: size and context, batch and precision where they vary. A point without a recording
has its status in the first cell and nothing in the others. Captions name the profiler that made the
table, as the results behind it do, and no clock: a profiled run is never a timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from lmlab.study.results import Result
from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import listed
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column

TITLES = {"size": "Size", "context": "Context", "batch": "Batch", "precision": "Precision"}
NO_PHASE = ["no phase: nothing here was timed by a clock"]

Key = tuple[Any, ...]


def place_names(points: pd.DataFrame) -> list[str]:
    """Size and context, and what else varies between points."""
    return ["size", "context", *(k for k in ("batch", "precision") if points[k].nunique() > 1)]


def place_columns(points: pd.DataFrame) -> list[Column]:
    """The leading columns of a table."""
    return [
        Column(TITLES[name], "left" if name == "size" else "right") for name in place_names(points)
    ]


def by_point(
    points: pd.DataFrame, width: int, cells: Callable[[Key], list[str]]
) -> list[list[str]]:
    """One row a point; `cells` gets its place and gives `width` cells."""
    rows = []
    for _, point in points.iterrows():
        leading = [str(point[name]) for name in place_names(points)]
        if point["status"] == "ok":
            rows.append([*leading, *cells(tuple(point[frames.PLACE]))])
        else:
            rows.append([*leading, STATUS_CELLS[point["status"]], *[NOTHING] * (width - 1)])
    return rows


def at(data: pd.DataFrame, key: Key) -> pd.DataFrame:
    """The rows of one point."""
    return frames.of(data, **dict(zip(frames.PLACE, key, strict=True)))


def tools_of(results: Iterable[Result]) -> str:
    """Which profiler made these results: `torch profiler 2.11`, or which and how often."""
    counts = Counter(str(result.data["tool"]) for result in results if result.status == "ok")
    if len(counts) == 1:
        return next(iter(counts))
    return listed(f"{tool} ({count} points)" for tool, count in counts.items())


def recorded(results: Sequence[Result], collected: Collected) -> str:
    """The caption of a table that a profiler made."""
    ok = [result for result in results if result.status == "ok"]
    if not ok:
        return with_reasons("Nothing recorded.", results)
    shown = [key for key in ("batch",) if len({r.parameters[key] for r in ok}) > 1]
    precisions = listed(dict.fromkeys(str(result.parameters["precision"]) for result in ok))
    said = describe(ok, phases=NO_PHASE, columns=shown).removesuffix(".")
    return with_reasons(f"{said}, {precisions}; recorded by {tools_of(ok)}.", results)


def kernel_word(collected: Collected) -> str:
    """What a row of a trace is: a kernel on a GPU, an operator on a CPU."""
    return "kernel" if collected.device == "cuda" else "operator"
