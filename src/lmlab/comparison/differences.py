"""Two sets of results, record by record: which is faster where both have the same point.

Records are matched on chapter, parameters, labels and clock; both must have done the same work, so
settings that both state must agree. The ratio is that of compare.py (more than 1: the second set is
faster), and so is its verdict. Two sets never shared a job: the interval holds the spread within
each job and the variation between processes, which is estimated from work that a set repeats in
several processes (`Noise`). The same measurement in both sets is the same, whatever its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from lmlab.comparison.sets import RATES, SAMPLING, TIME, ResultSet
from lmlab.report.compare import (
    FASTER,
    SAME,
    SLOWER,
    UNDECIDED,
    bounds,
    median_errors,
    process_variation,
    verdicts,
)
from lmlab.report.frame import Rows

KEYS = ["chapter", "point", "quantity", "clock"]
VERDICTS = (FASTER, SLOWER, SAME, UNDECIDED)
# What sets the pace of a time: variation between processes is pooled over each of them.
DEVICE, GPU, HOST, UNKNOWN = "device", "gpu", "host", "unknown"


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Work that a study repeats in several processes."""

    replicates: Mapping[str, Any]
    """Labels of the records that repeat one another..."""
    keys: Sequence[str]
    """...where they agree on these."""
    host_bound_below: float
    """A GPU that is busy for less than this share of wall time waits for the host."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How the second set differs from the first."""

    pairs: Rows
    """One row per record that both have: values, ratio, low, high, verdict."""
    only: Mapping[str, Rows]
    """Records with a value in one set alone, by the set's name."""
    differs: Mapping[str, tuple[str, str]]
    """Facts of the machines and versions that are not the same."""
    other_work: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings by which files of the same point were left out, with an example of both values."""
    variation: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """By pace: standard deviation of log times between processes, degrees of freedom."""

    def chapters(self) -> Rows:
        """Per chapter and clock: pairs, verdicts, geometric mean of the ratios."""
        if self.pairs.empty:
            return pd.DataFrame()
        groups = self.pairs.fillna({"clock": "-"}).groupby(["chapter", "clock"], sort=False)
        counts = groups["verdict"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=list(VERDICTS), fill_value=0)
        means = groups["ratio"].agg(lambda ratios: math.exp(np.log(ratios).mean()))
        found = counts.assign(pairs=groups.size(), geomean=means).reset_index()
        return found[["chapter", "clock", "pairs", *VERDICTS, "geomean"]]

    def largest(self, count: int) -> Rows:
        """Per chapter, the pairs whose ratio is furthest from 1."""
        size = np.abs(np.log(self.pairs["ratio"].astype(float)))
        ordered = self.pairs.assign(size=size).sort_values("size", ascending=False)
        return ordered.groupby("chapter", sort=False).head(count).drop(columns="size")

    def slower(self, by: float) -> Rows:
        """Pairs that are slower by more than a share."""
        return self.pairs[(self.pairs["verdict"] == SLOWER) & (self.pairs["ratio"] < 1 / (1 + by))]


def differences(
    first: ResultSet, second: ResultSet, noise: Noise, where: Mapping[str, str] | None = None
) -> Differences:
    """Match and judge the records of two sets whose chapter, parameters, settings and labels match
    `where` (several values of a key are separated by commas)."""
    a, b = (_with_pace(each.rows, noise) for each in (first, second))
    variation = _variation([a, b], noise)
    if where:
        a, b = a[_chosen(a, first, where)], b[_chosen(b, second, where)]
    valued = [rows[rows["status"] == "ok"] for rows in (a, b)]
    both: Rows = valued[0].merge(valued[1], on=KEYS, how="inner", suffixes=("_a", "_b"))
    both, other_work = _same_work(both, first, second)
    return Differences(
        pairs=_judged(both, variation, _identical(both, first, second)),
        only={first.name: _only(valued[0], b), second.name: _only(valued[1], a)},
        differs={
            key: (first.facts.get(key, "none"), second.facts.get(key, "none"))
            for key in {**first.facts, **second.facts}
            if first.files and second.files and first.facts.get(key) != second.facts.get(key)
        },
        other_work=other_work,
        variation=variation,
    )


def _chosen(rows: Rows, of: ResultSet, where: Mapping[str, str]) -> list[bool]:
    def matches(chapter: str, file: str, labels: Mapping[str, Any]) -> bool:
        values = {**of.files[file]["settings"], **labels, "chapter": chapter}
        return all(str(values.get(key)) in text.split(",") for key, text in where.items())

    wanted: Any = rows[["chapter", "file", "labels"]]
    return [matches(*row) for row in wanted.itertuples(index=False)]


def _with_pace(rows: Rows, noise: Noise) -> Rows:
    """The rows with `pace`: what sets the speed of a time, from its wall and device clock."""
    numeric = ["value", "q1", "q3", "n"]
    rows = rows.assign(**{name: pd.to_numeric(rows[name], errors="coerce") for name in numeric})
    keys = ["file", "point"]
    busy = rows[rows["clock"] == "device"].drop_duplicates(keys).set_index(keys)["value"]
    share = busy.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy() / rows["value"]
    wall = np.where(share.isna(), UNKNOWN, np.where(share < noise.host_bound_below, HOST, GPU))
    return rows.assign(pace=np.where(rows["clock"].isin(["device", "events"]), DEVICE, wall))


def _variation(sets: Sequence[Rows], noise: Noise) -> dict[str, tuple[float, int]]:
    """Variation between processes by pace; that of all wall times where a class has none."""
    repeated: list[dict[str, Any]] = []
    for index, rows in enumerate(sets):
        times: Any = rows[(rows["status"] == "ok") & rows["clock"].isin(["wall", "device"])]
        for values in times[["value", "clock", "pace", "labels"]].itertuples(index=False):
            labels = values.labels
            if all(labels.get(key) in _listed(want) for key, want in noise.replicates.items()):
                found = {key: labels.get(key) for key in noise.keys}
                common = {"set": index, "clock": values.clock, "pace": values.pace}
                repeated.append({**found, **common, "value": values.value})
    keys = [*noise.keys, "set", "clock"]

    def of(paces: Sequence[str]) -> tuple[float, int]:
        return process_variation([row for row in repeated if row["pace"] in paces], keys)

    found = {pace: of([pace]) for pace in (DEVICE, GPU, HOST)}
    wall = of([GPU, HOST, UNKNOWN])
    return {
        pace: found[pace] if pace == DEVICE or found.get(pace, wall)[1] else wall
        for pace in (DEVICE, GPU, HOST)
    } | {UNKNOWN: wall}


def _listed(wanted: Any) -> Any:
    return wanted if isinstance(wanted, list | tuple) else [wanted]


def _same_work(
    both: Rows, first: ResultSet, second: ResultSet
) -> tuple[Rows, dict[str, tuple[Any, Any]]]:
    """Pairs whose files agree on every setting that both state, except how long they measured."""
    unlike: dict[str, tuple[Any, Any]] = {}
    wrong = set()
    files: Any = both[["file_a", "file_b"]].drop_duplicates()
    for ours, theirs in files.itertuples(index=False):
        a, b = first.files[ours]["settings"], second.files[theirs]["settings"]
        found = {k: (a[k], b[k]) for k in a.keys() & b.keys() - SAMPLING if a[k] != b[k]}
        if found:
            unlike |= found
            wrong.add(ours)
    return both[~both["file_a"].isin(wrong)], unlike


def _identical(both: Rows, first: ResultSet, second: ResultSet) -> pd.Series[bool]:
    """Pairs that are one and the same measurement, in two places."""
    a = both["file_a"].map(lambda path: first.files[path]["identity"])
    b = both["file_b"].map(lambda path: second.files[path]["identity"])
    return ((a == b) & (both["value_a"] == both["value_b"])).astype(bool)


def _judged(
    both: Rows, variation: Mapping[str, tuple[float, int]], identical: pd.Series[bool]
) -> Rows:
    """Ratio, interval and verdict of every pair, by the rule of compare.py."""
    usable = (both["value_a"] > 0) & (both["value_b"] > 0)
    both, identical = both[usable], identical[usable]
    paces = [both[f"pace_{side}"] for side in "ab"]
    speed = np.where(both["quantity"].isin(RATES), -1.0, 1.0)
    ratio = (both["value_a"] / both["value_b"]) ** speed
    spreads = {pace: sd for pace, (sd, _) in variation.items()}
    freedoms = {pace: df or math.inf for pace, (_, df) in variation.items()}
    timed = both["quantity"] == TIME
    own, other = (pace.map(freedoms).astype(float) for pace in paces)
    df = own.where(own < other, other)
    parts: list[Any] = [pace.map(spreads).astype(float) for pace in paces]
    for side in "ab":
        q1, value, q3, n = (both[f"{name}_{side}"] for name in ("q1", "value", "q3", "n"))
        parts.append(median_errors(q1, value, q3, n, known=timed & np.isfinite(df)))
    error = np.sqrt(sum(part**2 for part in parts))
    df = df.where(np.isfinite(df), both["n_a"] + both["n_b"] - 2)
    low, high = bounds(ratio, np.where(identical, 0.0, error), np.where(identical, 1, df))
    return both.assign(
        ratio=ratio, low=low, high=high, verdict=verdicts(ratio, low, high), identical=identical
    ).drop(columns=["labels_a", "labels_b"])


def _only(mine: Rows, other: Rows) -> Rows:
    """Rows with a value here that have none there, with the reason that the other set gives."""
    valued = other[other["status"] == "ok"]
    alone = mine.merge(valued[KEYS], on=KEYS, how="left", indicator=True)
    alone = alone[alone["_merge"] == "left_only"].drop(columns=["_merge", "status", "reason"])
    failed = other[other["status"] != "ok"].drop_duplicates("file").set_index("file")
    return alone.assign(
        other_status=alone["file"].map(failed["status"]).astype(object).fillna("missing"),
        other_reason=alone["file"].map(failed["reason"]),
    )[[*KEYS, "file", "value", "other_status", "other_reason"]]
