"""The table of what was measured twice: how far two processes lie apart, by who is the limit."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.comparison import ACROSS_POINTS
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames import repeats as twice
from lmlab.writeup.numbers import excess, percent, significant
from lmlab.writeup.places import extreme, place
from lmlab.writeup.table import NOTHING, Column, Table

BUSY: dict[twice.Limit, str] = {
    "gpu": f"at least {percent(twice.GPU_LIMITED_FROM, 2)}",
    "partly": f"{100 * twice.HOST_LIMITED_BELOW:.0f} to {percent(twice.GPU_LIMITED_FROM, 2)}",
    "host": f"under {percent(twice.HOST_LIMITED_BELOW, 2)}",
    "unknown": "not recorded",
}


def repeats(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """The table, or nothing where no work was measured twice."""
    found = twice.repeats(data)
    if not len(found):
        return {}
    used = [row for row in collected.rows if _repeated(row, found)]
    results = [row.result for row in used if row.result is not None]
    table = Table(
        title="The same pass in two processes: by how much the longer median exceeds the shorter",
        columns=[
            Column("Device" if collected.device == "cpu" else "GPU busy", "left"),
            Column("Pairs"),
            Column("Median pair"),
            Column("Largest"),
            Column("Largest at", "left"),
            Column("Faster or slower beyond"),
        ],
        rows=_rows(collected, data, found),
        caption=f"{describe(results, columns=['start'])} {_note(found, collected.device)}",
        sources=sources_of(used),
    )
    return {"repeats": table}


def _repeated(row: Row, found: pd.DataFrame) -> bool:
    """Whether a point has a phase that another process measured too."""
    values = row.point.parameters
    return values["mode"] != "forward" and values["warmup"] in set(found["warmup"])


def _rows(collected: Collected, data: pd.DataFrame, found: pd.DataFrame) -> list[list[str]]:
    names = {**BUSY, "unknown": "CPU"} if collected.device == "cpu" else BUSY
    return [
        _row(names[limit], frames.of(found, limit=limit), tolerance)
        for limit, tolerance in twice.tolerances(data).items()
        if tolerance.pairs or (limit != "unknown" and collected.device != "cpu")
    ]


def _row(name: str, here: pd.DataFrame, tolerance: twice.Tolerance) -> list[str]:
    margin = excess(1 + tolerance.margin)
    if not len(here):
        return [name, "0", NOTHING, NOTHING, NOTHING, margin]
    worst = extreme(here, "difference", largest=True)
    return [
        name,
        str(tolerance.pairs),
        excess(1 + float(here["difference"].median())),
        excess(1 + tolerance.largest),
        f"{worst['phase']} of {place(worst)}, {worst['precision']}: "
        f"{significant(worst['median_ms_a'])} and {significant(worst['median_ms_b'])} ms",
        margin,
    ]


def _note(found: pd.DataFrame, device: str) -> str:
    """What the pairs are and why the largest of them is the tolerance."""
    kinds = found[["process_a", "process_b"]].drop_duplicates().itertuples(index=False, name=None)
    told = "; ".join(f"in {one} and in {other}" for one, other in kinds)
    share = "" if device == "cpu" else "; by the lower busy share of the two"
    return (
        f"Forward, backward or optimizer, {told}{share}. With k pairs "
        "a further one would exceed the largest about once in k + 1 times; fewer than "
        f"{twice.FEWEST_PAIRS} are no bound. A ratio across points must exceed the wider tolerance "
        f"of its two arms, and {percent(ACROSS_POINTS, 1)} in any case."
    )
