"""Tables of the collectives: what took part, times and bandwidths by size, and the fitted lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.caption import CLOCKS, device_of
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import BACKENDS, OPERATIONS
from lmlab.writeup.numbers import binary_bytes, counted, listed, percent, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

NOT_BEGUN = "no time"
REFUSED = "unsupported"
NOISY, FEW = "~", "†"
PLACEMENTS = {
    "own_gpu": "own GPU",
    "shared_gpu": "one GPU for all",
    "cpu": "CPU",
}


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name; each operation and format has its own."""
    data = frames.frame(collected.rows)
    pairs = data[["operation", "dtype"]].drop_duplicates().itertuples(index=False, name=None)
    return {
        "ranks": ranks(collected),
        **{f"times_{op}_{dtype}": times(collected, data, op, dtype) for op, dtype in pairs},
        "fits": fits(collected, data),
    }


def ranks(collected: Collected) -> Table:
    """Every point: what was asked for, and what the process group then said it was."""
    return Table(
        title="Ranks, as their process group describes itself",
        columns=[
            Column("Asked for", "left"),
            Column("Backend", "left"),
            Column("World size"),
            Column("Device", "left"),
            Column("GPUs"),
            Column("Nodes"),
            Column("Threads a rank"),
            Column("Outcome", "left"),
        ],
        rows=[_rank_row(row) for row in collected.rows],
        caption=f"{where_measured(collected.rows)} A world that the machine cannot hold is not "
        "started.",
        sources=sources_of(collected.rows),
    )


def _rank_row(row: Row) -> list[str]:
    asked = row.point.parameters
    wish = f"{counted(int(asked['world_size']), 'rank')}, {PLACEMENTS[str(asked['placement'])]}"
    if row.result is None or row.result.status != "ok":
        reason = f": {row.reason}" if row.reason else ""
        return [wish, *[NOTHING] * 6, f"{STATUS_CELLS[row.status]}{reason}"]
    group, cases = row.result.data["ranks"], row.result.data["cases"]
    timed = sum("samples_ms" in case for case in cases)
    return [
        wish,
        BACKENDS.get(group["backend"], group["backend"]),
        *(str(group[key]) for key in ("world_size", "device", "gpus", "nnodes", "threads")),
        f"{timed} of {counted(len(cases), 'case')} timed",
    ]


def times(collected: Collected, data: pd.DataFrame, operation: str, dtype: str) -> Table:
    """Median time and bus bandwidth: sizes down, what took part across."""
    here = frames.of(data, operation=operation, dtype=dtype)
    arms = frames.order(here, "arm")
    sizes = sorted({frames.nominal_mib(size) for size in here["size_bytes"]})
    body = [[binary_bytes(size * frames.MIB), *_cells(here, size, arms)] for size in sizes]
    return Table(
        title=f"{OPERATIONS[operation]}, {dtype}: time of the slowest rank in ms "
        "(algorithm / bus bandwidth in GB/s)",
        columns=[Column("Size"), *(Column(arm) for arm in arms)],
        rows=body,
        caption=" ".join(
            filter(
                None,
                [where_measured(collected.rows), _statistics(here), _marks(here), _gaps(here)],
            )
        ),
        sources=sources_of(_used(collected)),
    )


def _cells(here: pd.DataFrame, size: int, arms: Sequence[str]) -> list[str]:
    at = here[here["size_bytes"].map(frames.nominal_mib) == size]
    return [_cell(frames.of(at, arm=arm)) for arm in arms]


def _cell(case: pd.DataFrame) -> str:
    if not len(case):
        return NOTHING
    row = case.iloc[0]
    if math.isnan(row["median_ms"]):
        return NOT_BEGUN if row["cut"] else REFUSED
    rates = [
        NOTHING if math.isnan(row[key]) else significant(row[key])
        for key in ("algorithm_gb_per_s", "bus_gb_per_s")
    ]
    noisy, few = NOISY if row["noisy"] else "", FEW if frames.has_few_samples(row) else ""
    return f"{noisy}{significant(row['median_ms'])}{few} ({' / '.join(rates)})"


def _marks(here: pd.DataFrame) -> str:
    """What the marks at a time mean, and how many have them."""
    timed = frames.measured(here)
    noisy, few = timed[timed["noisy"]], timed[frames.has_few_samples(timed)]
    told = []
    if len(noisy):
        told.append(f"{NOISY} noisy: {frames.NOISY_MEANS} ({len(noisy)} of {len(timed)} times).")
    if len(few):
        told.append(
            f"{FEW} {frames.samples(few['n'])}: too few samples to show how far they scatter "
            f"({len(few)} of {len(timed)} times)."
        )
    return " ".join(told)


def _gaps(here: pd.DataFrame) -> str:
    """What stands in the cells without a number."""
    missing = here[here["median_ms"].isna()]
    cut, refused = missing[missing["cut"]], missing[~missing["cut"]]
    told = []
    if len(cut):
        told.append(
            f"“{NOT_BEGUN}”: the fewest repetitions did not fit into what was left of the job's "
            f"{frames.time_caps(cut)}."
        )
    told += [
        f"“{REFUSED}” on {arm}: {reason}."
        for arm, reason in dict.fromkeys(
            refused[["arm", "reason"]].itertuples(index=False, name=None)
        )
    ]
    return " ".join(told)


def fits(collected: Collected, data: pd.DataFrame) -> Table:
    """Latency and bandwidth of every line, and how far the worst size lies off it."""
    lines = frames.fits(data)
    body = [
        [
            str(line["arm"]),
            OPERATIONS[str(line["operation"])],
            str(line["dtype"]),
            significant(line["latency_ms"]),
            NOTHING if math.isnan(line["bus_gb_per_s"]) else significant(line["bus_gb_per_s"]),
            percent(line["worst_error"], 2),
            str(line["sizes"]),
        ]
        for _, line in lines.iterrows()
    ]
    return Table(
        title="Latency and bandwidth: a line through the times of all sizes",
        columns=[
            Column("Ranks", "left"),
            Column("Operation", "left"),
            Column("Format", "left"),
            Column("Latency (ms)"),
            Column("Bus bandwidth (GB/s)"),
            Column("Worst size off by"),
            Column("Sizes"),
        ],
        rows=body or [["No line", *[NOTHING] * 6]],
        caption=f"{where_measured(collected.rows)} Fitted to relative errors of the medians; a "
        f"line needs {frames.FEWEST_SIZES} sizes. A latency of 0 stands where the line would need "
        "a negative one, since large sizes take longer a byte than small ones. One rank sends "
        "nothing: its line is what a call costs.",
        sources=sources_of(_used(collected)),
    )


def _used(collected: Collected) -> list[Row]:
    return [row for row in collected.rows if row.status == "ok"]


def where_measured(rows: Sequence[Row]) -> str:
    """The device, and that CPU ranks are none of it."""
    results = [row.result for row in rows if row.result is not None]
    names = listed(dict.fromkeys(map(device_of, results)))
    devices = {r.data["ranks"]["device"] for r in results if r.status == "ok"}
    on_host = any(r.machine["device"] == "cuda" for r in results) and "cpu" in devices
    host = "; CPU ranks run on its host" if on_host else ""
    return f"{names}{host}." if names else "Nothing measured."


def _statistics(here: pd.DataFrame) -> str:
    counts = frames.measured(here)["n"]
    if not len(counts):
        return ""
    allowed = ", as time and scatter allowed" if counts.nunique() > 1 else ""
    return (
        f"{CLOCKS['host'].capitalize()}, median over repetitions of the slowest rank, "
        f"{frames.samples(counts)}{allowed}."
    )
