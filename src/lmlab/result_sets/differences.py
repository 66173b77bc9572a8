"""Compare two sets of results, record by record: which is faster where both have the same point.

Records are matched on chapter, parameters, labels and clock; settings that both sets state must
agree, so that both did the same work. Ratios (above 1: the second set is faster) are judged by the
rule in report/verdict.py. The sets never share a job, so the interval combines the spread within
each job with the variation between processes, estimated from work that a set repeats in several
processes (`Noise`). A measurement found in both sets is "same", whatever its noise. Memory is
treated as free of noise: a difference of more than 1 % is "less" or "more".

Of a thousand equal pairs, a 95 % interval calls about fifty different. Tables of verdicts accept
that; a regression gate should use `certain`, which corrects for the number of pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr

from lmlab.report import compare
from lmlab.report.compare import Noise, Variation
from lmlab.report.frame import Rows, records, select
from lmlab.report.verdict import CONFIDENCE, FASTER, SAME, SLOWER, UNDECIDED, interval
from lmlab.result_sets.sets import MEMORY, RATES, TIME, ResultSet

KEYS = ["chapter", "point", "quantity", "clock"]
COMPARED = ["value", "q1", "q3", "n", "status", "reason", "file", "pace"]
# Settings that say how long to measure, not what.
SAMPLING = {"steps", "samples", "rounds", "time_cap_s", "variant_cap_s", "skip_if_too_large"}
LESS, MORE = "less", "more"
COUNTED = (FASTER, SLOWER, LESS, MORE, SAME, UNDECIDED)
SMALLEST_MEMORY_DIFFERENCE = 0.01
# What limits a time; variation between processes is pooled over each class.
PACES = DEVICE, GPU, HOST, UNKNOWN = "device", "gpu", "host", "unknown"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How the second set differs from the first."""

    pairs: Rows  # one row per record in both: values, ratio, low, high, verdict, chance
    only: tuple[Rows, Rows]  # records with a value only in the first set, only in the second
    differs: Mapping[str, tuple[str, str]]
    """Facts of the machines and versions that are not the same."""
    other_work: Mapping[str, tuple[Any, Any]]
    """Settings by which files of the same point were left out, with an example of both values."""
    variation: Mapping[str, Variation]
    """By pace: standard deviation of log times between processes, degrees of freedom."""

    def chapters(self) -> Rows:
        """Per chapter and clock, or memory: pairs, verdicts, geometric mean of the ratios."""
        if self.pairs.empty:
            return pd.DataFrame()
        other = self.pairs["quantity"].isin(MEMORY).map({True: "memory", False: "-"})
        named = self.pairs.assign(clock=self.pairs["clock"].fillna(other))
        groups = named.groupby(["chapter", "clock"], sort=False)
        counts = groups["verdict"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=list(COUNTED), fill_value=0)
        means = groups["ratio"].agg(lambda ratios: math.exp(np.log(ratios).mean()))
        return counts.assign(pairs=groups.size(), geomean=means).reset_index()

    def certain(self) -> Rows:
        """Times and rates that differ after correction for the number of pairs: one in twenty of
        these is expected to be a false positive (Benjamini and Hochberg)."""
        from scipy.stats import false_discovery_control  # takes a second to import

        times = self.pairs[~self.pairs["quantity"].isin(MEMORY) & ~self.pairs["identical"]]
        adjusted = false_discovery_control(times["chance"]) if len(times) else times["chance"]
        return times[adjusted < 1 - CONFIDENCE]

    def largest(self, count: int) -> Rows:
        """Per chapter, the pairs whose ratio is furthest from 1."""
        ordered = self.pairs.sort_values("ratio", key=lambda ratio: -np.abs(np.log(ratio)))
        return ordered.groupby("chapter", sort=False).head(count)


def differences(
    first: ResultSet, second: ResultSet, noise: Noise, where: Mapping[str, str] | None = None
) -> Differences:
    """Match and judge the records of two sets whose chapter, parameters, settings and labels match
    `where` (several values of a key are separated by commas)."""
    a, b = (_with_pace(each.rows, noise) for each in (first, second))
    variation = _variation([a, b], noise)
    a, b = (_chosen(rows, where or {}) for rows in (a, b))
    valued = [rows.loc[rows["status"] == "ok", [*KEYS, *COMPARED]] for rows in (a, b)]
    both: Rows = valued[0].merge(valued[1], on=KEYS, suffixes=("_a", "_b"))
    both, other_work = _same_work(both, first, second)
    known = {**first.facts, **second.facts} if first.files and second.files else {}
    facts = {key: (first.facts.get(key, "none"), second.facts.get(key, "none")) for key in known}
    return Differences(
        pairs=_judged(both, variation),
        only=(_only(valued[0], b), _only(valued[1], a)),
        differs={key: values for key, values in facts.items() if values[0] != values[1]},
        other_work=other_work,
        variation=variation,
    )


def _chosen(rows: Rows, where: Mapping[str, str]) -> Rows:
    for key, text in where.items():
        rows = rows[rows[key].map(str).isin(text.split(","))] if key in rows else rows.head(0)
    return rows


def _with_pace(rows: Rows, noise: Noise) -> Rows:
    """Add `pace`: what limits a time, judged by its wall and device clocks."""
    numeric = ["value", "q1", "q3", "n"]
    rows = rows.assign(**{name: pd.to_numeric(rows[name], errors="coerce") for name in numeric})
    rows["n"] = rows["n"].fillna(1).astype(int)
    keys = ["file", "point"]
    busy = rows[rows["clock"] == "device"].drop_duplicates(keys)[[*keys, "value"]]
    share = rows.merge(busy, on=keys, how="left")["value_y"].to_numpy() / rows["value"]
    return rows.assign(pace=pace_of(rows["clock"], share, noise))


def pace_of(clock: Any, busy: Any, noise: Noise) -> Any:
    """Classify what limits a time, or each of many, by its clock and the share of it for which the
    device is busy."""
    wall = np.where(pd.isna(busy), UNKNOWN, np.where(busy < noise.host_bound_below, HOST, GPU))
    return np.where(np.isin(clock, ["device", "events"]), DEVICE, wall)


def _variation(sets: Sequence[Rows], noise: Noise) -> dict[str, Variation]:
    """Variation between processes by pace; a wall class without replicates uses all wall times."""
    rows = pd.concat([rows.assign(set=index) for index, rows in enumerate(sets)])
    times = select(rows, status="ok", clock=["wall", "device"], **noise.replicates)

    def of(*paces: str) -> Variation:
        found = select(times, pace=paces)
        return compare.process_variation(records(found), [*noise.keys, "set", "clock"])

    wall = of(GPU, HOST, UNKNOWN)
    found = {DEVICE: of(DEVICE), GPU: of(GPU), HOST: of(HOST), UNKNOWN: wall}
    return {pace: own if own[1] or pace == DEVICE else wall for pace, own in found.items()}


def _same_work(
    both: Rows, first: ResultSet, second: ResultSet
) -> tuple[Rows, dict[str, tuple[Any, Any]]]:
    """Drop pairs whose files disagree on a setting that both state, except how long to measure;
    mark pairs that are one and the same measurement; also return the settings that differ."""
    unlike: dict[str, tuple[Any, Any]] = {}
    wrong, copied = set(), set()
    for ours, theirs in set(zip(both["file_a"], both["file_b"], strict=True)):
        mine, other = first.files[ours], second.files[theirs]
        a, b = mine["settings"], other["settings"]
        found = {k: (a[k], b[k]) for k in a.keys() & b.keys() - SAMPLING if a[k] != b[k]}
        unlike |= found
        wrong |= {ours} if found else set()
        copied |= {ours} if mine["identity"] == other["identity"] else set()
    identical = both["file_a"].isin(copied) & (both["value_a"] == both["value_b"])
    return both.assign(identical=identical)[~both["file_a"].isin(wrong)], unlike


def _judged(both: Rows, variation: Mapping[str, Variation]) -> Rows:
    """Ratio, interval and verdict of every pair, by the rule of report/verdict.py."""
    both = both[(both["value_a"] > 0) & (both["value_b"] > 0)]
    estimates = [_estimate(row, variation) for row in records(both)]
    intervals = [interval(*estimate) for estimate in estimates]
    found = {name: [getattr(i, name) for i in intervals] for name in ("ratio", "low", "high")}
    found |= {"chance": [_chance(*estimate) for estimate in estimates]}
    both = both.assign(**found, verdict=[each.verdict for each in intervals])
    memory, most = both["quantity"].isin(MEMORY), 1 + SMALLEST_MEMORY_DIFFERENCE
    sizes = np.select([both["ratio"] > most, both["ratio"] < 1 / most], [LESS, MORE], SAME)
    return both.assign(verdict=both["verdict"].mask(memory, sizes))


def _estimate(
    row: Mapping[str, Any], variation: Mapping[str, Variation]
) -> tuple[float, float, float]:
    """A pair's ratio, the standard error of its logarithm, and degrees of freedom."""
    ratio = row["value_a"] / row["value_b"]
    ratio = 1 / ratio if row["quantity"] in RATES else ratio
    if row["identical"] or row["quantity"] in MEMORY:
        return ratio, 0.0, 1
    a, b = ({name: row[f"{name}_{side}"] for name in ("q1", "value", "q3", "n")} for side in "ab")
    paces = (row["pace_a"], row["pace_b"]) if row["quantity"] == TIME else ()
    _, error, df = compare.unpaired(b, a, *(variation[pace] for pace in paces))
    return ratio, error, df


def _chance(ratio: float, error: float, df: float) -> float:
    """P-value: how likely a ratio at least this far from 1 is if nothing differs."""
    if not error or not math.isfinite(error) or df < 1:
        return float(bool(error) or ratio == 1)
    return float(2 * stdtr(df, -abs(math.log(ratio)) / error))


def _only(mine: Rows, other: Rows) -> Rows:
    """Rows without a counterpart among the other set's values, with its status and reason."""
    valued = other[other["status"] == "ok"]
    alone = mine.merge(valued[KEYS], on=KEYS, how="left", indicator=True)
    alone = alone[alone["_merge"] == "left_only"]
    failed = other[other["status"] != "ok"].drop_duplicates("file").set_index("file")
    return alone.assign(
        other_status=alone["file"].map(failed["status"]).astype(object).fillna("missing"),
        other_reason=alone["file"].map(failed["reason"]),
    )[[*KEYS, "file", "value", "other_status", "other_reason"]]
