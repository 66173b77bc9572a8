"""What the collectives say: how fast ranks exchange tensors, and what that depends on.

All sentences compare cases of one job, or say that they do not: ranks of different worlds are
different processes. A time that is noisy or of few samples stands with their number and range, so
that nobody reads a difference into two medians that their samples do not carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from lmlab.writeup.checks.collectives import TIMES_APART
from lmlab.writeup.collect import Collected
from lmlab.writeup.comparison import (
    ACROSS_POINTS,
    FEW_SAMPLES_APART,
    FEWEST_SAMPLES,
    Verdict,
    margin_of,
    timed,
    verdict,
)
from lmlab.writeup.findings.collectives_doubts import (
    cut,
    from_on,
    gap,
    noise,
    noisy_inside,
    up_to,
)
from lmlab.writeup.findings.collectives_lines import fit
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import FIRST, MIB, OPERATIONS
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

NOTHING_MEASURED = "No collective was measured."
VERDICTS = {"faster": "faster", "slower": "slower", "same": "not told apart"}


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
        "fit": fit(data),
        "cut": cut(every),
        "gap": gap(every),
        "noise": noise(data),
        "noisy_inside": noisy_inside(data),
        "published": published(collected),
    }


def summary(data: pd.DataFrame) -> str:
    """The largest all-reduce of the smallest world in every place, for the abstract."""
    largest = _largest(frames.of(frames.between_ranks(data), operation=FIRST))
    if not len(largest):
        return "No all-reduce between ranks was measured." if len(data) else NOTHING_MEASURED
    chosen = largest.sort_values("world_size", kind="stable").drop_duplicates("placement")
    told = [f"{_headline(row)} with {row['arm']}" for _, row in chosen.iterrows()]
    return f"The largest all-reduce in {chosen.iloc[0]['dtype']} takes {listed(told)}."


def _headline(row: pd.Series) -> str:
    case = "; ".join([frames.asked_for(row["size_bytes"]), *_scatter(row)])
    return f"{significant(row['median_ms'])} ms ({case})"


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
    rest = (
        f" The others, each a job of its own, reach {listed(map(_bandwidth, others))}."
        if others
        else ""
    )
    return f"The highest bus bandwidth of an all-reduce is {_bandwidth(first)}.{rest}"


def _bandwidth(row: pd.Series) -> str:
    """The best median; where its samples scatter, from the slowest to the fastest of them."""
    ends = [row["bus_gb_per_s"] * row["median_ms"] / row[key] for key in ("max_ms", "min_ms")]
    case = f"{frames.asked_for(row['size_bytes'])}, {row['dtype']}"
    return (
        f"{significant(row['bus_gb_per_s'])} GB/s with {row['arm']} "
        f"({'; '.join([case, *_scatter(row, ends, 'GB/s')])})"
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
    """How an all-reduce of one size changes from the fewest ranks to the most that share one."""
    here = frames.of(frames.between_ranks(data), operation=FIRST)
    told, faster = [], []
    for _, every in here.groupby(["placement", "backend"], sort=False):
        place = frames.of(every, dtype=frames.order(every, "dtype")[0])
        worlds = sorted(set(place["world_size"]))
        compared = (_same_sizes(place, worlds[0], more) for more in reversed(worlds[1:]))
        pairs = next(filter(None, compared), None)
        if pairs:
            told.append(_grown(*pairs[-1]))
        for few, more in pairwise(worlds):
            faster += _faster_with_more(_same_sizes(place, few, more))
    if not told:
        return "How the time grows with the number of ranks is not known: no two worlds compare."
    exceptions = f" Not every step up costs time: {'; '.join(faster)}." if faster else ""
    return f"More ranks: {'; '.join(told)}.{exceptions}"


def _worlds_apart(few: pd.Series, more: pd.Series) -> Verdict:
    """How a case of the larger world compares: another process, and maybe few samples."""
    margin = max(ACROSS_POINTS, margin_of(few["n"], more["n"]))
    return verdict(timed(more), timed(few), margin=margin)


def _faster_with_more(pairs: list[tuple[pd.Series, pd.Series]]) -> list[str]:
    """At how many sizes the larger of two worlds takes less time, and where most so."""
    faster = [pair for pair in pairs if _worlds_apart(*pair) == "faster"]
    if not faster:
        return []
    few, more = max(faster, key=lambda pair: float(pair[0]["median_ms"] / pair[1]["median_ms"]))
    return [
        f"{more['arm']} take less than {few['arm']} at {len(faster)} of "
        f"{counted(len(pairs), 'size')} (most so at {frames.asked_for(few['size_bytes'])}: "
        f"{significant(more['median_ms'])} against {significant(few['median_ms'])} ms)"
    ]


def _grown(few: pd.Series, most: pd.Series) -> str:
    doubt = f": {VERDICTS['same']}" if _worlds_apart(few, most) == "same" else ""
    told = [
        f"{significant(row['median_ms'])} ms with {row['arm']}{_in_brackets(_scatter(row))}"
        for row in (few, most)
    ]
    return (
        f"an all-reduce of {frames.asked_for(few['size_bytes'])} takes {listed(told)}, "
        f"{times(most['median_ms'] / few['median_ms'])} as long in another job{doubt}"
    )


def _same_sizes(place: pd.DataFrame, few: int, most: int) -> list[tuple[pd.Series, pd.Series]]:
    """The cases of two worlds by the sizes that both have exchanged, the smallest first."""
    # By the size asked for: ranks that do not divide it share a few bytes less.
    one, other = (
        {frames.nominal_mib(row["size_bytes"]): row for _, row in cases.iterrows()}
        for cases in (frames.of(place, world_size=world) for world in (few, most))
    )
    return [(one[mib], other[mib]) for mib in sorted(one.keys() & other.keys())]


def operations(data: pd.DataFrame) -> str:
    """How the other operations compare with an all-reduce of the same job, size and format."""
    here = frames.between_ranks(data)
    base = frames.of(here, operation=FIRST)
    halves = frames.halves(data)
    keys = ["arm", "dtype", "size_bytes"]
    told = []
    for operation in frames.order(here[here["operation"] != FIRST], "operation"):
        pairs = frames.of(here, operation=operation).merge(base, on=keys, suffixes=("", "_base"))
        if len(pairs):
            ratios = pairs["median_ms"] / pairs["median_ms_base"]
            sizes = pairs["size_bytes"].map(frames.nominal_mib)
            told.append(
                f"{OPERATIONS[operation].lower()} takes {_median_ratio(ratios, sizes, halves)} "
                f"({span(ratios, 2)})"
            )
    if not told:
        return "No other operation was measured beside an all-reduce of the same ranks."
    scatter = _gloo_scatter(here)
    return (
        f"Beside an all-reduce of the same job, size and format, {listed(told)}: the median case, "
        f"and from the least to the most.{scatter}"
    )


def _median_ratio(ratios: pd.Series, sizes: pd.Series, halves: tuple[list[int], list[int]]) -> str:
    """The median of all sizes, or of the small and the large ones where these differ."""
    small, large = (ratios[sizes.isin(half)] for half in halves)
    if not _differ(small, large):
        return f"{times(ratios.median())} as long"
    return (
        f"{times(small.median())} as long {up_to(halves)} and {times(large.median())} "
        f"{from_on(halves)}"
    )


def _differ(one: pd.Series, other: pd.Series) -> bool:
    """Whether the median of each lies outside of the other's middle half."""
    if min(len(one), len(other)) < FEWEST_SAMPLES:
        return False
    return not any(
        base.quantile(0.25) <= each.median() <= base.quantile(0.75)
        for each, base in ((one, other), (other, one))
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
    here = frames.of(frames.between_ranks(data), operation=FIRST)
    known = frames.order(here, "dtype")
    if len(known) < 2:
        return "Number formats cannot be compared: all-reduce was measured in fewer than two."
    base, other = known[:2]
    # By the size asked for: six ranks share a few bytes less, and not as many in every format.
    sized = here.assign(mib=here["size_bytes"].map(frames.nominal_mib))
    pairs = frames.of(sized, dtype=other).merge(
        frames.of(sized, dtype=base), on=["arm", "mib"], suffixes=("_b", "_a")
    )
    largest = [extreme(part, "mib", largest=True) for _, part in pairs.groupby("arm", sort=False)]
    if not largest:
        return "Number formats cannot be compared: no ranks exchanged one size in both."
    return (
        "At the largest size that a set of ranks has in both formats, an all-reduce of the same "
        f"bytes takes in {other}, against {base}, {listed(map(_format_line, largest))}."
        f"{_stricter(largest)}"
    )


def _format_line(row: pd.Series) -> str:
    counts = row["n_a"], row["n_b"]
    found = verdict(timed(row, "_b"), timed(row, "_a"), margin=margin_of(*counts))
    return (
        f"{times(row['median_ms_b'] / row['median_ms_a'])} as long with {row['arm']} "
        f"({binary_bytes(row['mib'] * MIB)}, {frames.samples(counts)}: {VERDICTS[found]})"
    )


def _stricter(rows: list[pd.Series]) -> str:
    """What it takes to differ where there are few samples."""
    if not any(margin_of(row["n_a"], row["n_b"]) for row in rows):
        return ""
    return (
        f" With fewer than {FEWEST_SAMPLES} samples, middle halves must lie more than "
        f"{percent(FEW_SAMPLES_APART, 1)} apart to be told apart."
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


def _scatter(row: pd.Series, ends: Sequence[float] | None = None, unit: str = "ms") -> list[str]:
    """`n = 3, 611 to 1,160 ms` of a case that is noisy or has few samples; nothing of others."""
    if not (row["noisy"] or frames.has_few_samples(row)):
        return []
    if row["n"] == 1:
        return ["n = 1"]
    return [f"n = {row['n']:.0f}, {span(ends or (row['min_ms'], row['max_ms']))} {unit}"]


def _in_brackets(words: Sequence[str]) -> str:
    return f" ({'; '.join(words)})" if words else ""
