"""What the collectives say: how fast ranks exchange tensors, and what that depends on.

All sentences compare cases of one job, or say that they do not: ranks of different worlds are
different processes.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.checks.collectives import TIMES_APART
from lmlab.writeup.collect import Collected
from lmlab.writeup.comparison import Timed, Verdict, verdict
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import MIB, OPERATIONS
from lmlab.writeup.numbers import (
    binary_bytes,
    counted,
    listed,
    percent,
    significant,
    span,
    times,
)
from lmlab.writeup.places import extreme
from lmlab.writeup.references import published_all_reduce
from lmlab.writeup.tables.collectives import PLACEMENTS

FIRST = "all_reduce"
NOTHING_MEASURED = "No collective was measured."


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    every = frames.frame(collected.rows)
    data = frames.measured(every)
    return {
        "summary": summary(data),
        "not_here": not_here(collected),
        "bandwidth": bandwidth(data),
        "one_rank": one_rank(data),
        "more_ranks": more_ranks(data),
        "operations": operations(data),
        "formats": formats(data),
        "fit": fit(frames.fits(data)),
        "cut": cut(every),
        "published": published(collected),
    }


def summary(data: pd.DataFrame) -> str:
    """The largest all-reduce of the smallest world in every place, for the abstract."""
    largest = _largest(frames.of(data[data["world_size"] > 1], operation=FIRST))
    if not len(largest):
        return NOTHING_MEASURED
    chosen = largest.sort_values("world_size", kind="stable").drop_duplicates("placement")
    told = [
        f"{significant(row['median_ms'])} ms ({_size(row)}) with {row['arm']}"
        for _, row in chosen.iterrows()
    ]
    return f"The largest all-reduce in {chosen.iloc[0]['dtype']} takes {listed(told)}."


def not_here(collected: Collected) -> str:
    """Worlds that the machine cannot hold, and how many nobody has tried if none is known."""
    refused: dict[str, list[str]] = {}
    for row in collected.rows:
        if row.status == "unsupported":
            place = PLACEMENTS[str(row.point.parameters["placement"])]
            refused.setdefault(place, []).append(str(row.point.parameters["world_size"]))
    missing = sum(row.status == "missing" for row in collected.rows)
    if not refused and missing:
        return f"Of the worlds that the study asks for, {missing} were not measured."
    if not refused:
        return "No world that the study asks for was refused here."
    told = [f"{listed(worlds)} ({place})" for place, worlds in refused.items()]
    return f"Worlds that could not be started here, by their ranks: {'; '.join(told)}."


def bandwidth(data: pd.DataFrame) -> str:
    """The highest bus bandwidth of each set of ranks in an all-reduce, the highest of all first."""
    moved = frames.of(data[data["bus_gb_per_s"].notna()], operation=FIRST)
    if not len(moved):
        return "No bus bandwidth can be given: no all-reduce between ranks was measured."
    best = [
        extreme(frames.of(moved, arm=arm), "bus_gb_per_s", largest=True)
        for arm in frames.order(moved, "arm")
    ]
    first, *others = sorted(best, key=lambda row: -float(row["bus_gb_per_s"]))
    told = [
        f"{significant(row['bus_gb_per_s'])} GB/s with {row['arm']}" for row in [first, *others]
    ]
    rest = f" The others reach {listed(told[1:])}." if others else ""
    return (
        f"The highest bus bandwidth of an all-reduce is {told[0]} ({_size(first)}, "
        f"{first['dtype']}).{rest}"
    )


def one_rank(data: pd.DataFrame) -> str:
    """What a call costs where there is nobody to talk to."""
    alone = frames.of(data, world_size=1)
    if not len(alone):
        return "A world of one rank was not measured."
    arms = listed(frames.order(alone, "arm"))
    return (
        f"A world of one rank ({arms}) sends nothing; its calls take "
        f"{span(alone['median_ms'])} ms: that is the cost of calling, and of copies that the "
        "backend makes all the same."
    )


def more_ranks(data: pd.DataFrame) -> str:
    """How an all-reduce of one size changes from the fewest ranks to the most."""
    here = frames.of(data[data["world_size"] > 1], operation=FIRST)
    told = []
    for _, place in here.groupby(["placement", "backend"], sort=False):
        pair = _fewest_and_most(frames.of(place, dtype=frames.order(place, "dtype")[0]))
        if pair is not None:
            few, most = pair
            told.append(
                f"an all-reduce of {_size(few)} takes {significant(few['median_ms'])} ms with "
                f"{few['arm']} and {significant(most['median_ms'])} ms with {most['arm']} "
                f"({times(most['median_ms'] / few['median_ms'])} as long, in another process)"
            )
    if not told:
        return "How the time grows with the number of ranks is not known: no two worlds compare."
    return f"More ranks: {'; '.join(told)}."


def _fewest_and_most(place: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """The largest size that the smallest and the largest world have both exchanged."""
    worlds = sorted(set(place["world_size"]))
    if len(worlds) < 2:
        return None
    few, most = (
        frames.of(place, world_size=world).set_index(
            frames.of(place, world_size=world)["size_bytes"].map(frames.nominal_mib)
        )
        for world in (worlds[0], worlds[-1])
    )
    common = few.index.intersection(most.index)
    return (few.loc[common.max()], most.loc[common.max()]) if len(common) else None


def operations(data: pd.DataFrame) -> str:
    """How the other operations compare with an all-reduce of the same job, size and format."""
    here = data[data["world_size"] > 1]
    base = frames.of(here, operation=FIRST)
    keys = ["arm", "dtype", "size_bytes"]
    told = []
    for operation in frames.order(here[here["operation"] != FIRST], "operation"):
        pairs = frames.of(here, operation=operation).merge(base, on=keys, suffixes=("", "_base"))
        if len(pairs):
            ratios = pairs["median_ms"] / pairs["median_ms_base"]
            told.append(
                f"{OPERATIONS[operation].lower()} takes {times(ratios.median())} as long "
                f"({span(ratios, 2)})"
            )
    if not told:
        return "No other operation was measured beside an all-reduce of the same ranks."
    scatter = _gloo_scatter(here)
    return (
        f"Beside an all-reduce of the same job, size and format, {listed(told)}: the median case, "
        f"and from the least to the most.{scatter}"
    )


def _gloo_scatter(here: pd.DataFrame) -> str:
    used = frames.of(here, operation="reduce_scatter", backend="gloo")
    if not len(used):
        return ""
    return (
        " Gloo has no reduce-scatter: torch makes it of an all-reduce of a copy, and what is "
        "measured is that."
    )


def formats(data: pd.DataFrame) -> str:
    """Whether the same bytes take longer in one format than in another."""
    here = frames.of(data[data["world_size"] > 1], operation=FIRST)
    known = frames.order(here, "dtype")
    if len(known) < 2:
        return "Number formats cannot be compared: all-reduce was measured in fewer than two."
    base, other = known[:2]
    # By the size asked for: six ranks share a few bytes less, and not as many in every format.
    sized = here.assign(mib=here["size_bytes"].map(frames.nominal_mib))
    pairs = frames.of(sized, dtype=other).merge(
        frames.of(sized, dtype=base), on=["arm", "mib"], suffixes=("_b", "_a")
    )
    verdicts: dict[Verdict, list[pd.Series]] = {}
    for _, part in pairs.groupby("arm", sort=False):
        row = extreme(part, "mib", largest=True)
        found = verdict(_timed(row, "_b"), _timed(row, "_a"), margin=0.0)
        verdicts.setdefault(found, []).append(row)
    if not verdicts:
        return "Number formats cannot be compared: no ranks exchanged one size in both."
    told = [_format_line(found, rows) for found, rows in verdicts.items()]
    counts = [row[key] for rows in verdicts.values() for row in rows for key in ("n_a", "n_b")]
    samples = " to ".join(dict.fromkeys(f"{find(counts):.0f}" for find in (min, max)))
    return (
        f"At the largest size of both (n = {samples}), an all-reduce of the same bytes in "
        f"{other} is, against {base}, {'; '.join(told)}."
    )


def _format_line(found: Verdict, rows: list[pd.Series]) -> str:
    arms = listed(str(row["arm"]) for row in rows)
    if found == "same":
        return f"neither faster nor slower with {arms}"
    ratios = span((row["median_ms_b"] / row["median_ms_a"] for row in rows), 3)
    return f"{found} with {arms} ({ratios} times as long)"


def fit(lines: pd.DataFrame) -> str:
    """Latency and bandwidth of an all-reduce, and how well the line holds."""
    here = frames.of(lines[lines["world_size"] > 1], operation=FIRST)
    if not len(here):
        return "No line could be fitted: an all-reduce has too few measured sizes."
    first = frames.of(here, dtype=frames.order(here, "dtype")[0])
    told = [
        f"{_latency(row['latency_ms'])} and {significant(row['bus_gb_per_s'])} GB/s with "
        f"{row['arm']}"
        for _, row in first.iterrows()
    ]
    worst = extreme(first, "worst_error", largest=True)
    return (
        f"As latency and bus bandwidth, all-reduce in {first.iloc[0]['dtype']}: {'; '.join(told)}. "
        f"These lines are off by at most {percent(worst['worst_error'], 2)} ({worst['arm']})"
        f"{_other_lines(lines, first)}."
    )


def _other_lines(lines: pd.DataFrame, told: pd.DataFrame) -> str:
    """How far off the lines are of which nothing else is said."""
    others = lines[lines["world_size"] > 1].drop(told.index)
    if not len(others):
        return ""
    worst = extreme(others, "worst_error", largest=True)
    return (
        f", those of other operations and formats by up to {percent(worst['worst_error'], 2)} "
        f"({OPERATIONS[worst['operation']].lower()}, {worst['dtype']}, {worst['arm']})"
    )


def _latency(milliseconds: float) -> str:
    return f"{significant(milliseconds)} ms" if milliseconds > 0 else "a latency below the noise"


def cut(every: pd.DataFrame) -> str:
    """How many cases had no time left."""
    if not len(every):
        return NOTHING_MEASURED
    missing = every[every["median_ms"].isna()]
    if not len(missing):
        return f"All {counted(len(every), 'case')} were timed."
    smallest = binary_bytes(frames.nominal_mib(missing["size_bytes"].min()) * MIB)
    return (
        f"{len(missing)} of {counted(len(every), 'case')} have no time, none of them below "
        f"{smallest}; each says why in its result."
    )


def published(collected: Collected) -> str:
    """What publications say, and why it cannot be held against the times here."""
    theirs = published_all_reduce(collected.references)
    if not len(theirs):
        return "No publication in report/references has all-reduce times."
    growth = theirs["value"].max() / theirs["value"].min()
    sources, gpus = (listed(sorted(set(theirs[column]))) for column in ("source", "gpu"))
    unlikely = (
        f" Over sizes from {_least_and_most(theirs)} they differ by no more than "
        f"{times(growth, 2)}: an exchange would differ by more."
        if growth < TIMES_APART
        else ""
    )
    return (
        f"Publication {sources} has all-reduce times of {gpus} in no stated unit, so they are not "
        f"put beside these.{unlikely}"
    )


def _least_and_most(theirs: pd.DataFrame) -> str:
    sizes = sorted({int(text.split()[0]) for text in theirs["parameter"]})
    return f"{sizes[0]} to {sizes[-1]:,} MiB"


def _largest(data: pd.DataFrame) -> pd.DataFrame:
    """The largest case of every set of ranks, in the first format."""
    if not len(data):
        return data
    here = frames.of(data, dtype=frames.order(data, "dtype")[0])
    return here.loc[here.groupby("arm", sort=False)["size_bytes"].idxmax()]


def _timed(row: pd.Series, suffix: str) -> Timed:
    return Timed(*(float(row[f"{name}{suffix}"]) for name in ("median_ms", "q1_ms", "q3_ms")))


def _size(row: pd.Series) -> str:
    return binary_bytes(frames.nominal_mib(row["size_bytes"]) * MIB)
