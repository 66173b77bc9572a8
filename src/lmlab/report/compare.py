"""Variant against baseline, everywhere both were measured; `verdict` says which is faster.

Inside one job, variants take turns, so round i of one is paired with round i of the other and
drift cancels; where one was sampled more often than the other, medians are compared. Between jobs
there is no pairing, so the variation between processes is added to the spread within each job; it
is measured where a study ran the same work in several processes (`Noise`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import geometric_mean, quantiles, variance
from typing import Any

import numpy as np

from lmlab.report.frame import STATISTICS, Rows, records, select, table_of
from lmlab.report.text import times
from lmlab.report.verdict import FASTER, SAME, SLOWER, UNDECIDED, Interval, interval


def paired(variant: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Rounds of one job: the mean log ratio of paired samples, with Student's t interval. If one
    variant has more samples than the other, they are not pairs, and medians are compared."""
    if (n := len(variant)) != len(baseline):
        return unpaired(variant, baseline)
    logs = np.log(np.asarray(baseline, float)) - np.log(np.asarray(variant, float))
    error = float(np.std(logs, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return interval(math.exp(float(logs.mean())), error, n - 1)


def unpaired(
    variant: Sequence[float],
    baseline: Sequence[float],
    *,
    between: float = 0.0,
    df: float = math.inf,
) -> Interval:
    """Two jobs: spread within each, plus `between`, the standard error of the log ratio that comes
    from the variation between processes. `df` is the degrees of freedom of that estimate; infinite
    means that there was none."""
    known = math.isfinite(df)
    medians, errors = [], []
    for samples in (variant, baseline):
        # Ten times as fast as numpy on a few samples, and needs two of them.
        two = samples if len(samples) > 1 else [*samples] * 2
        q1, median, q3 = quantiles(two, n=4, method="inclusive")
        errors.append(median_error(q1, median, q3, len(samples), known=known))
        medians.append(median)
    freedom = df if known else len(variant) + len(baseline) - 2
    ratio = float(np.divide(medians[1], medians[0]))  # of zeros: not a number, so undecided
    return interval(ratio, math.hypot(*errors, between), freedom)


def median_error(q1: float, median: float, q3: float, n: float, *, known: bool) -> float:
    """Relative standard error of a median, from the interquartile range so that one outlier does
    not decide. A single sample says nothing about its error, unless the variation between
    processes is `known`, which contains it."""
    if n < 2:
        return 0.0 if known else math.inf
    return float(1.2533 * np.divide(q3 - q1, median) / 1.349 / math.sqrt(n))


def process_variation(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> tuple[float, int]:
    """Standard deviation of log values among replicates: rows that agree on `keys` but come from
    different processes. Pooled over all groups, with its degrees of freedom."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(math.log(row["value"]))
    repeated = [logs for logs in groups.values() if len(logs) > 1]
    freedom = sum(len(logs) - 1 for logs in repeated)
    squares = math.fsum(variance(logs) * (len(logs) - 1) for logs in repeated)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Work that a study repeats in several processes: how much these vary."""

    replicates: Mapping[str, Any]  # the rows that repeat one another, where they agree on `keys`
    keys: Sequence[str]
    host_bound_below: float  # a GPU that is busy for less of the wall time waits for the host


@dataclass(frozen=True, kw_only=True)
class Compare:
    """A declared comparison."""

    variant: Mapping[str, Any]
    baseline: Mapping[str, Any]
    on: Sequence[str]  # fields on which a variant and its baseline must agree
    where: Mapping[str, Any] = field(default_factory=lambda: {"quantity": "time", "clock": "wall"})
    noise: Noise | None = None  # from which variation between jobs is estimated
    pool: Sequence[str] = ()
    """Fields whose values mark rows of like variation; it is pooled over each such class."""

    def run(self, rows: Rows) -> "Comparison":
        """Pair up what both have."""
        rows = select(rows, status="ok", **self.where)
        variants = _indexed(select(rows, **self.variant), self.on)
        baselines = _indexed(select(rows, **self.baseline), self.on)
        variation = self._variation(rows)
        return Comparison(
            Pair(
                **vars(_interval_of(row, baselines[key], variation)),
                point=dict(zip(self.on, key, strict=True)),
                variant=row,
                baseline=baselines[key],
            )
            for key, row in variants.items()
            if key in baselines
        )

    def _variation(self, rows: Rows) -> Callable[[Any], tuple[float, float]]:
        """Variation between processes for a row: of its class, or of all rows where its class has
        no replicates; none where the comparison declares none."""
        if self.noise is None:
            return lambda row: (0.0, math.inf)
        found, keys = select(rows, **self.noise.replicates), self.noise.keys
        used = {*keys, *self.pool, "value"}
        replicates = records(found[[name for name in found if name in used]])
        overall = process_variation(replicates, keys)

        @cache
        def of_class(key: tuple[Any, ...]) -> tuple[float, float]:
            mine = [r for r in replicates if tuple(r.get(name) for name in self.pool) == key]
            between, freedom = process_variation(mine, keys)
            return (between, freedom) if freedom else (overall[0], overall[1] or math.inf)

        return lambda row: of_class(tuple(row.get(name) for name in self.pool))


def samples_of(row: Mapping[str, Any]) -> Sequence[float]:
    """What was timed; of a quantity that was computed, its value."""
    return row["samples"] if isinstance(row["samples"], list | tuple) else [float(row["value"])]


def _interval_of(
    variant: Any, baseline: Any, variation: Callable[[Any], tuple[float, float]]
) -> Interval:
    ours, theirs = samples_of(variant), samples_of(baseline)
    if variant["source"] == baseline["source"]:
        return paired(ours, theirs)
    (own, own_df), (other, other_df) = variation(variant), variation(baseline)
    return unpaired(ours, theirs, between=math.hypot(own, other), df=min(own_df, other_df))


@dataclass(frozen=True, kw_only=True)
class Pair(Interval):
    """Variant and baseline at one point, and their ratio."""

    point: Mapping[str, Any]
    variant: Mapping[str, Any]
    baseline: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The point in words: "xl, 1024"."""
        return ", ".join(str(value) for value in self.point.values())


class Comparison(list[Pair]):
    """All pairs of one comparison; empty if nothing was measured on both sides."""

    def where(self, **point: Any) -> "Comparison":
        """The pairs whose point matches."""
        return Comparison(p for p in self if all(p.point[k] == v for k, v in point.items()))

    def judged(self, verdict: str) -> list[Pair]:
        """The pairs with that verdict."""
        return [pair for pair in self if pair.verdict == verdict]

    faster = property(lambda self: self.judged(FASTER))
    slower = property(lambda self: self.judged(SLOWER))
    same = property(lambda self: self.judged(SAME))
    undecided = property(lambda self: self.judged(UNDECIDED))

    @property
    def best(self) -> Pair:
        """The pair with the largest ratio."""
        return max(self, key=lambda pair: pair.ratio)

    @property
    def worst(self) -> Pair:
        """The pair with the smallest ratio."""
        return min(self, key=lambda pair: pair.ratio)

    @property
    def geomean(self) -> float:
        """Geometric mean of the ratios."""
        return geometric_mean(pair.ratio for pair in self)

    def rows(self) -> Rows:
        """The pairs as rows for a table or a figure: `speedup` with its verdict."""
        rows = []
        for pair in self:
            shown = times(pair.ratio) if pair.decided else pair.verdict
            judged = {"low": pair.low, "high": pair.high, "verdict": pair.verdict, "speedup": shown}
            own = {"quantity": "speedup", "unit": "x", "clock": None, "value": pair.ratio, **judged}
            rows.append({**pair.variant, **dict.fromkeys(STATISTICS), **pair.point, **own})
        return table_of(rows)


def _indexed(rows: Rows, on: Sequence[str]) -> dict[tuple[Any, ...], Any]:
    found = {tuple(row[name] for name in on): row for row in records(rows)}
    if len(found) < len(rows):
        raise ValueError(f"comparison: several rows agree on {', '.join(on)}")
    return found
