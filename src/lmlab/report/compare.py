"""Compare variants with baselines wherever both were measured; `verdict` decides which is faster.

Within one job, variants are interleaved, so round i of one is paired with round i of the other and
drift cancels. Medians are compared if sample counts differ, and of device times, which are profiled
one variant after the other. Samples of different jobs cannot be paired, so the variation between
processes is added; it is estimated from work that the study ran in several processes (`Noise`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import geometric_mean, variance
from typing import Any

import numpy as np

from lmlab.report.frame import STATISTICS, Rows, records, select, table_of
from lmlab.report.text import times
from lmlab.report.verdict import FASTER, SAME, SLOWER, UNDECIDED, Interval, interval

Row = Mapping[str, Any]
WIDE = 1.25
"""From here on, upper over lower end, tables quote an interval instead of its ratio."""
Variation = tuple[float, int]
"""Between processes: standard deviation of log values, and degrees of freedom; 0 if unknown."""


def paired(variant: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Compare rounds of one job: mean log ratio of paired samples, with Student's t interval. From
    ten rounds on, the mean is trimmed by a tenth at each end, so that one hiccup cannot decide."""
    logs = np.sort(np.log(np.asarray(baseline, float)) - np.log(np.asarray(variant, float)))
    n, cut = len(logs), len(logs) // 10
    kept = logs[cut : n - cut]
    # The standard error of a trimmed mean needs the winsorized standard deviation.
    spread = float(np.std(np.clip(logs, kept[0], kept[-1]), ddof=1)) if n > 1 else math.inf
    return interval(math.exp(float(kept.mean())), spread * math.sqrt(n) / len(kept), len(kept) - 1)


def unpaired(variant: Row, baseline: Row, *variations: Variation) -> tuple[float, float, float]:
    """Ratio of medians, standard error of its logarithm, and degrees of freedom. The error combines
    the spread within each job (from the interquartile range, so that one outlier cannot decide)
    with the variation between processes. The error of a single sample is infinite unless that
    variation, which includes it, is known."""
    known = min((df for _, df in variations if df), default=0)
    errors = [spread for spread, _ in variations]
    for row in (variant, baseline):
        if count_of(row) > 1:
            spread = np.divide(row["q3"] - row["q1"], row["value"])
            errors.append(float(1.2533 * spread / 1.349 / math.sqrt(row["n"])))
        elif not known:
            errors.append(math.inf)
    ratio = float(np.divide(baseline["value"], variant["value"]))  # 0 / 0 is NaN: undecided
    return ratio, math.hypot(*errors), known or count_of(variant) + count_of(baseline) - 2


def count_of(row: Row) -> int:
    """Number of samples behind a value; a computed value counts as a single sample."""
    return 1 if row["n"] is None or math.isnan(row["n"]) else int(row["n"])


def process_variation(rows: Iterable[Row], keys: Sequence[str]) -> Variation:
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
    """Work that a study repeats in several processes, which shows how much processes vary."""

    replicates: Mapping[str, Any]  # selects rows; those equal on `keys` are replicates
    keys: Sequence[str]
    host_bound_below: float  # GPU-busy share of wall time below which the host is the limit


@dataclass(frozen=True, kw_only=True)
class Compare:
    """A declared comparison."""

    variant: Mapping[str, Any]
    baseline: Mapping[str, Any]
    on: Sequence[str]  # fields on which a variant and its baseline must agree
    by: Sequence[str] = ()  # fields that tell several variants of one baseline apart
    where: Mapping[str, Any] = field(default_factory=lambda: {"quantity": "time", "clock": "wall"})
    noise: Noise | None = None  # from which variation between jobs is estimated
    pool: Sequence[str] = ()
    """Fields whose values mark rows of like variation; it is pooled over each such class."""

    def run(self, rows: Rows) -> "Comparison":
        """Pair each variant row with its baseline; rows without a partner are dropped."""
        rows = select(rows, status="ok", **self.where)
        names = [*self.on, *self.by]
        variants = _indexed(select(rows, **self.variant), names)
        baselines = _indexed(select(rows, **self.baseline), self.on)
        variation = self._variation(rows)
        return Comparison(
            Pair(
                **vars(_interval_of(row, baseline, variation)),
                point=dict(zip(names, key, strict=True)),
                variant=row,
                baseline=baseline,
            )
            for key, row in variants.items()
            if (baseline := baselines.get(key[: len(self.on)]))
        )

    def _variation(self, rows: Rows) -> Callable[[Row], Variation]:
        """Return a function from a row to the variation between processes: of the row's class, or
        of all rows if its class has no replicates; unknown if no `noise` is declared."""
        if self.noise is None:
            return lambda row: (0.0, 0)
        replicates, keys = records(select(rows, **self.noise.replicates)), self.noise.keys
        overall = process_variation(replicates, keys)

        @cache
        def of_class(key: tuple[Any, ...]) -> Variation:
            mine = [r for r in replicates if tuple(r.get(name) for name in self.pool) == key]
            own = process_variation(mine, keys)
            return own if own[1] else overall

        return lambda row: of_class(tuple(row.get(name) for name in self.pool))


def _interval_of(variant: Row, baseline: Row, variation: Callable[[Row], Variation]) -> Interval:
    if variant["source"] != baseline["source"]:
        return interval(*unpaired(variant, baseline, variation(variant), variation(baseline)))
    if count_of(variant) == count_of(baseline) > 1 and variant["clock"] != "device":
        return paired(variant["samples"], baseline["samples"])
    return interval(*unpaired(variant, baseline))


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

    @property
    def ends(self) -> list[float]:
        """The ratio, or both ends of its interval where that is wide."""
        return [self.ratio] if self.high < WIDE * self.low else [self.low, self.high]


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
            shown = " to ".join(map(times, pair.ends)) if pair.decided else pair.verdict
            judged = {"low": pair.low, "high": pair.high, "verdict": pair.verdict, "speedup": shown}
            own = {**pair.point, "quantity": "speedup", "unit": "x", "value": pair.ratio, **judged}
            rows.append({**pair.variant, **dict.fromkeys([*STATISTICS, "clock"]), **own})
        return table_of(rows)


def _indexed(rows: Rows, on: Sequence[str]) -> dict[tuple[Any, ...], Any]:
    listed = [(tuple(row[name] for name in on), row) for row in records(rows)]
    found = dict(listed)
    if len(found) < len(listed):
        key, count = Counter(key for key, _ in listed).most_common(1)[0]
        same = dict(zip(on, key, strict=True))
        raise ValueError(f"comparison: {count} rows for {same}; add a field to `on` or `where`")
    return found
