"""Tables that hold the timeline against the host: two clocks, waits and gaps, slow ranges."""

from __future__ import annotations

import math

from lmlab.writeup import profile_words as words
from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import factor, fixed, mean_and_deviation, percent, significant
from lmlab.writeup.numbers import shared_decimals as decimals
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.profile_rows import (
    Key,
    at,
    by_point,
    kernel_word,
    place_columns,
    place_names,
    recorded,
    tools_of,
)

NOT_THERE = "not measured"


def clock(collected: Collected) -> Table:
    """The forward pass by the host's clock, by the timeline, and in the end-to-end chapter."""
    points, modes = frames.points(collected), frames.modes(collected)
    forward = frames.of(modes, mode="forward")
    elsewhere = frames.end_to_end_forward(collected)
    device = "GPU" if collected.device == "cuda" else "Operators"

    def cells(key: Key) -> list[str]:
        point, run = at(points, key).iloc[0], at(forward, key).iloc[0]
        median = point["median_ms"]
        other = at(elsewhere, key)["other_median_ms"]
        places = max(decimals(point["mean_ms"], point["sd_ms"]), decimals(median, None))
        return [
            f"{mean_and_deviation(point['mean_ms'], point['sd_ms'])} ({fixed(median, places)})",
            significant(run["span_ms"]),
            significant(run["busy_ms"]),
            factor(run["span_ms"] / median),
            percent(run["busy_ms"] / median),
            factor(median / other.iloc[0]) if len(other) else NOT_THERE,
        ]

    titles = [
        "Host clock (ms)",
        "Timeline (ms)",
        f"{device} busy (ms)",
        "Timeline / clock",
        "Busy / clock",
        "Clock / end to end",
    ]
    return Table(
        title="A forward pass by the host's clock and by the timeline",
        columns=[*place_columns(points), *(Column(title) for title in titles)],
        rows=by_point(points, len(titles), cells),
        caption=_clock_caption(collected),
        sources=[
            *sources_of(collected.rows),
            *sources_of(_forward_rows(collected)),
        ],
    )


def _clock_caption(collected: Collected) -> str:
    said = with_reasons(describe(collected.results), collected.results)
    tools = tools_of(collected.results)
    if not tools:
        return said
    return (
        f"{said} Clock: mean ± standard deviation (median) before any profiler ran, in the same "
        "process; ratios use the median. Timeline: from the start of the first "
        f"{kernel_word(collected)} to the end of the last, recorded by {tools}. Clock / end to end "
        "is a ratio across points: that chapter's forward pass ran in a process of its own."
    )


def _forward_rows(collected: Collected) -> list[Row]:
    rows = collected.beside.get("end_to_end", ())
    asked = frames.points(collected)[frames.PLACE].drop_duplicates()
    places = set(asked.itertuples(index=False, name=None))
    return [
        row
        for row in rows
        if row.point.parameters["mode"] == "forward"
        and row.point.parameters["start"] == "warm"
        and tuple(row.point.parameters[key] for key in frames.PLACE) in places
    ]


def host(collected: Collected) -> dict[str, Table]:
    """The train step: how far ahead the host ran, where it waited, what gaps it left.

    A CPU is its own host, so there is no such table.
    """
    if collected.device != "cuda":
        return {}
    points, modes = frames.points(collected), frames.modes(collected)
    steps = frames.of(modes, mode="train_step")

    def cells(key: Key) -> list[str]:
        run = at(steps, key).iloc[0]
        return [
            significant(run["span_ms"]),
            significant(run["host_ms"]),
            _wait(run["wait_ms"], run["wait_call"], run["wait_after"]),
            *(
                NOTHING if math.isnan(run[key]) else significant(run[key])
                for key in ("launch_us", "delay_ms")
            ),
            f"{run['gaps']:,}",
            significant(run["gap_ms"]),
            percent(run["late_gap_ms"] / run["span_ms"], 2) if run["span_ms"] else NOTHING,
        ]

    titles = [
        "Device, first to last kernel (ms)",
        "Host, all phases (ms)",
        "Host waits at the end (ms)",
        "Launch, mean (µs)",
        "Launch to start, median (ms)",
        "Gaps",
        "Gaps in all (ms)",
        "Host-bound share",
    ]
    table = Table(
        title="Host and device in one train step",
        columns=[*place_columns(points), *(Column(title) for title in titles)],
        rows=by_point(points, len(titles), cells),
        caption=f"{recorded(collected.results, collected)} A launch takes longer where the queue "
        "of launches is full and the host waits for room in it. A gap is time in which nothing "
        "ran; the host-bound share is that of gaps before a kernel that was launched only after "
        "the device had run dry. A profiler slows the host and not the kernels, so it is an upper "
        "bound.",
        sources=sources_of(collected.rows),
    )
    return {"host": table}


def _wait(ms: float, call: str | None, after: str | None) -> str:
    if call is None:
        return "nowhere"
    return f"{significant(ms)} in {call}" + (f" after {after}" if after else "")


def slow_ranges(collected: Collected) -> dict[str, Table]:
    """Ranges that took many times their median; no table where there is none."""
    rows, points = frames.slow_ranges(collected), frames.points(collected)
    if rows.empty:
        return {}
    names = place_names(points)
    body = [
        [
            *(str(row[name]) for name in names),
            words.MODE_NAMES.get(row["run"], NOTHING),
            row["range"],
            significant(row["duration_ms"]),
            factor(row["times"], 2),
            row["kernel"] or NOTHING,
            row["call"] or NOTHING,
        ]
        for _, row in rows.iterrows()
    ]
    table = Table(
        title="Ranges that took more than five times their median on the host",
        columns=[
            *place_columns(points),
            Column("Run", "left"),
            Column("Range", "left", code=True),
            Column("Took (ms)"),
            Column("Of its median"),
            Column("Most device time in it", "left", code=True),
            Column("Most host time in it", "left", code=True),
        ],
        rows=body,
        caption=f"{recorded(collected.results, collected)} A range's median is over all ranges of "
        "its name in the recording; ranges under 0.1 ms are left out.",
        sources=sources_of(collected.rows),
    )
    return {"slow_ranges": table}
