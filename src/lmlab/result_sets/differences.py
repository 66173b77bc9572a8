"""Compare two sets of results, record by record: which is faster where both have the same point.

Records are matched on chapter, parameters, labels and clock; settings that both sets state must
agree, so that both did the same work. Ratios (above 1: the second set is faster) are judged by the
rule in report/verdict.py. The sets never share a job, so the interval combines the spread within
each job with the variation between processes, estimated from work that a set repeats in several
processes (`Noise`). A measurement found in both sets is "same", whatever its noise. Memory is
treated as free of noise: a difference of more than 1 % is "less" or "more".

Of a thousand equal pairs, a 95 % interval calls about fifty different. Tables of verdicts accept
that; a regression gate should use `significant`, which corrects for the number of pairs.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr

from lmlab.report import compare
from lmlab.report.compare import Noise, Row, Variation
from lmlab.report.frame import Rows, records, select
from lmlab.report.verdict import CONFIDENCE, FASTER, SAME, SLOWER, UNDECIDED, interval
from lmlab.result_sets.sets import MEMORY, RATES, TIME, Files, ResultSet

KEYS = ["chapter", "point", "quantity", "clock"]
COMPARED = ["value", "q1", "q3", "n", "status", "reason", "file", "bound"]
# Settings that say how long to measure, not what.
SAMPLING = {"steps", "samples", "rounds", "time_cap_s", "variant_cap_s", "skip_if_too_large"}
LESS, MORE = "less", "more"
COUNTED = (FASTER, SLOWER, LESS, MORE, SAME, UNDECIDED)
SMALLEST_MEMORY_DIFFERENCE = 0.01
# What limits a time; variation between processes is pooled over each class.
BOUNDS = DEVICE, GPU, HOST, UNKNOWN = "device", "gpu", "host", "unknown"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How the second set differs from the first."""

    pairs: Rows  # one row per record in both: values, ratio, low, high, verdict, p_value
    only: tuple[Rows, Rows]  # records with a value only in the first set, only in the second
    differs: Mapping[str, tuple[str, str]]
    """Facts of the machines and versions that are not the same."""
    other_work: Mapping[str, tuple[Any, Any]]
    """Settings by which files of the same point were left out, with an example of both values."""
    variation: Mapping[str, Variation]
    """By bound: standard deviation of log times between processes, degrees of freedom."""

    def chapters(self) -> Rows:
        """Per chapter and clock, or memory: pairs, verdicts, geometric mean of the ratios."""
        if self.pairs.empty:
            return pd.DataFrame()
        other = self.pairs["quantity"].isin(MEMORY).map({True: "memory", False: "-"})
        logs = np.log(self.pairs["ratio"].replace([0, math.inf], math.nan))  # 0 in one set only
        named = self.pairs.assign(clock=self.pairs["clock"].fillna(other), log=logs)
        groups = named.groupby(["chapter", "clock"], sort=False)
        counts = groups["verdict"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=list(COUNTED), fill_value=0)
        means = np.exp(groups["log"].mean())
        return counts.assign(pairs=groups.size(), geomean=means).reset_index()

    def significant(self) -> Rows:
        """Times and rates that differ after correction for the number of pairs: at most one in
        twenty of these is expected to be a false positive (Benjamini and Hochberg)."""
        from scipy.stats import false_discovery_control  # takes a second to import

        times = self.pairs[~self.pairs["quantity"].isin(MEMORY) & ~self.pairs["identical"]]
        adjusted = false_discovery_control(times["p_value"]) if len(times) else times["p_value"]
        return times[adjusted < 1 - CONFIDENCE]

    def lost(self) -> Rows:
        """Points with times in the first set that ran out of memory or failed in the second."""
        rows = select(self.only[0], quantity=[TIME, *RATES], other_status=["oom", "failed"])
        return rows.drop_duplicates(["file", "other_status", "other_reason"])

    def largest(self, count: int) -> Rows:
        """Per chapter, the pairs whose ratio is furthest from 1."""
        ordered = self.pairs.sort_values("ratio", key=lambda ratio: np.minimum(ratio, 1 / ratio))
        return ordered.groupby("chapter", sort=False).head(count)


def differences(
    first: ResultSet, second: ResultSet, noise: Noise, where: Mapping[str, Sequence[str]] = {}
) -> Differences:
    """Match and judge the records of two sets whose fields have the values in `where`."""
    a, b = (_with_bound(each.rows, noise) for each in (first, second))
    variation = _variation([a, b], noise)
    wanted = {key: lambda value, v=values: str(value) in v for key, values in where.items()}
    chosen = (select(select(rows, status="ok"), **wanted) for rows in (a, b))
    ours, theirs = (rows[[*KEYS, *COMPARED]] for rows in chosen)
    mine, others = first.files, second.files
    both, other_work = _same_work(ours.merge(theirs, on=KEYS, suffixes=("_a", "_b")), mine, others)
    known = {**first.facts, **second.facts} if mine and others else {}
    unlike = {file for file in mine.keys() & others if _unlike(mine[file], others[file])}
    facts = {key: (first.facts.get(key, "none"), second.facts.get(key, "none")) for key in known}
    return Differences(
        pairs=_judged(both, variation),
        only=(_only(ours, theirs, b, unlike), _only(theirs, ours, a, unlike)),
        differs={key: values for key, values in facts.items() if values[0] != values[1]},
        other_work=other_work,
        variation=variation,
    )


def _with_bound(rows: Rows, noise: Noise) -> Rows:
    """Add `bound`: what limits a time, judged by its wall and device clocks."""
    numeric = ["value", "q1", "q3", "n"]
    rows = rows.assign(**{name: pd.to_numeric(rows[name], errors="coerce") for name in numeric})
    rows["n"] = rows["n"].fillna(1).astype(int)
    keys = ["file", "point"]
    busy = rows[rows["clock"] == "device"].drop_duplicates(keys)[[*keys, "value"]]
    share = rows.merge(busy, on=keys, how="left")["value_y"].to_numpy() / rows["value"]
    return rows.assign(bound=bound_of(rows["clock"], share, noise))


def bound_of(clock: Any, busy: Any, noise: Noise) -> Any:
    """What limits a time, or each of many, by its clock and how much of it the device is busy."""
    wall = np.where(pd.isna(busy), UNKNOWN, np.where(busy < noise.host_bound_below, HOST, GPU))
    return np.where(np.isin(clock, ["device", "events"]), DEVICE, wall)


def _variation(sets: Sequence[Rows], noise: Noise) -> dict[str, Variation]:
    """Variation between processes by bound; a wall class without replicates uses all wall times."""
    rows = pd.concat([rows.assign(set=index) for index, rows in enumerate(sets)])
    times = select(rows, status="ok", clock=["wall", "device"], **noise.replicates)
    times = times[times["value"] > 0]

    def of(*bounds: str) -> Variation:
        found = select(times, bound=bounds)
        return compare.process_variation(records(found), [*noise.keys, "set", "clock"])

    wall = of(GPU, HOST, UNKNOWN)
    found = {DEVICE: of(DEVICE), GPU: of(GPU), HOST: of(HOST), UNKNOWN: wall}
    return {bound: own if own[1] or bound == DEVICE else wall for bound, own in found.items()}


def _same_work(both: Rows, first: Files, second: Files) -> tuple[Rows, dict[str, tuple[Any, Any]]]:
    """Drop pairs whose files are `_unlike`; mark pairs that are one and the same measurement; also
    return the settings that differ."""
    files = set(zip(both["file_a"], both["file_b"], strict=True))
    unlike = {a: found for a, b in files if (found := _unlike(first[a], second[b]))}
    copied = {a for a, b in files if first[a]["identity"] == second[b]["identity"]}
    identical = both["file_a"].isin(copied) & (both["value_a"] == both["value_b"])
    settings = {name: values for found in unlike.values() for name, values in found.items()}
    return both.assign(identical=identical)[~both["file_a"].isin(unlike)], settings


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings on which two files disagree, except how long to measure."""
    a, b = ours["settings"], theirs["settings"]
    return {k: (a[k], b[k]) for k in a.keys() & b.keys() - SAMPLING if a[k] != b[k]}


def _judged(both: Rows, variation: Mapping[str, Variation]) -> Rows:
    """Ratio, interval and verdict of every pair, by the rule of report/verdict.py."""
    both = both[(both["value_a"] >= 0) & (both["value_b"] >= 0)]
    estimates = [_estimate(row, variation) for row in records(both)]
    intervals = [interval(*estimate) for estimate in estimates]
    found = {k: [getattr(i, k) for i in intervals] for k in ("ratio", "low", "high", "verdict")}
    both = both.assign(**found, p_value=[_p_value(*estimate) for estimate in estimates])
    memory, most = both["quantity"].isin(MEMORY), 1 + SMALLEST_MEMORY_DIFFERENCE
    sizes = np.select([both["ratio"] > most, both["ratio"] < 1 / most], [LESS, MORE], SAME)
    return both.assign(verdict=both["verdict"].mask(memory, sizes))


def _estimate(row: Row, variation: Mapping[str, Variation]) -> tuple[float, float, float]:
    """A pair's ratio, the standard error of its logarithm, and degrees of freedom."""
    over, under = (row[f"value_{side}"] for side in ("ba" if row["quantity"] in RATES else "ab"))
    ratio = 1.0 if over == under else over / under if under else math.inf
    exact = row["identical"] or row["quantity"] in MEMORY or over == under == 0
    if exact or not (over and under):  # relative noise is unknown at 0
        return ratio, 0.0 if exact else math.inf, 1
    a, b = ({name: row[f"{name}_{side}"] for name in ("q1", "value", "q3", "n")} for side in "ab")
    bounds = (row["bound_a"], row["bound_b"]) if row["quantity"] == TIME else ()
    _, error, df = compare.unpaired(b, a, *(variation[bound] for bound in bounds))
    return ratio, error, df


def _p_value(ratio: float, error: float, df: float) -> float:
    """P-value: how likely a ratio at least this far from 1 is if nothing differs."""
    if not error or not math.isfinite(error) or df < 1:
        return float(bool(error) or ratio == 1)
    return float(2 * stdtr(df, -abs(math.log(ratio)) / error))


def _only(mine: Rows, theirs: Rows, other: Rows, unlike: set[str]) -> Rows:
    """Rows without a counterpart, and how the point or such a record failed in the other set,
    unless that did other work."""
    alone = mine.merge(theirs[KEYS], on=KEYS, how="left", indicator=True)
    alone = alone[alone["_merge"] == "left_only"]
    failed = defaultdict(list)
    for row in records(other[other["status"] != "ok"]):
        failed[row["chapter"]].append(({*row["point"].split()}, row["status"], row["reason"]))
    found = [
        next((why for some, *why in failed[chapter] if some <= {*point.split()}), ["missing", None])
        if file not in unlike
        else ["other work", None]
        for chapter, point, file in alone[["chapter", "point", "file"]].itertuples(index=False)
    ]
    why = pd.DataFrame(found, alone.index, ["other_status", "other_reason"], dtype=object)
    return alone[[*KEYS, "file", "value"]].join(why)
