"""All results of a study as one tidy DataFrame: one row per measured quantity.

A row has the point's parameters, its scalar settings, the record's labels, and the value with its
statistics. A point that failed, ran out of memory, is missing or has an unreadable file also gets a
row, with status and reason but no quantity or labels, so that a table can say why a cell is empty.
Everything downstream (tables, figures, comparisons) selects rows and never reads files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.report.text import UNSTEADY
from lmlab.study.points import Point
from lmlab.study.results import Result, ResultError, checked, read

MISSING, INVALID, UNCOMMITTED = "missing", "invalid", "uncommitted"
STATISTICS = ("samples", "n", "q1", "q3", "min", "max", "mean", "sd", "noisy", "drift", "stability")
NOISE = {"noisy": [True], "stability": UNSTEADY}
"""What is computed from a measurement with one of these values inherits it."""
NO_STATISTICS = {name: None for name in STATISTICS if name not in NOISE}
"""For a row that is computed from another: quartiles of a ratio are not ratios of quartiles."""
RECORD_FIELDS = ("quantity", "status", "reason", "unit", "value", "clock", "cache", "stopped")
FIELDS = ("chapter", "source", "flags", *RECORD_FIELDS, *STATISTICS)

Rows = pd.DataFrame
Where = Mapping[str, Any]
Value = Callable[[Rows], Any]


@dataclass(frozen=True)
class Results:
    """The results of one study on one machine."""

    machine: str
    rows: Rows
    results: Mapping[str, Result] = field(default_factory=dict)  # readable results by path
    problems: tuple[str, ...] = ()  # one line per file that could not be used
    repeat: "Results | None" = None  # a second set of the same study on a machine of the same model

    @property
    def name(self) -> str:
        """The name that the machine reports; its id if there are no results."""
        return next((str(r.machine["name"]) for r in self.results.values()), self.machine)

    def of(self, chapter: str) -> list[Result]:
        """The readable results of one chapter."""
        return [result for result in self.results.values() if result.chapter == chapter]

    def value(self, **where: Any) -> Any:
        """The one value that matches, or None if it was not measured."""
        found = select(self.rows, status="ok", **where)
        if len(found) > 1:
            raise ValueError(f"{where}: {len(found)} rows match, one is expected")
        return None if found.empty else found["value"].iloc[0]


def load(points: Iterable[Point], folder: Path, machine: str) -> Results:
    """Read every point's result; a missing or unusable one becomes a row with a reason."""
    rows: list[dict[str, Any]] = []
    results: dict[str, Result] = {}
    problems: list[str] = []
    for point in points:
        path = point.path(folder, machine)
        without = {"status": MISSING, "reason": "not measured"}
        try:
            if path.exists():
                result = checked(read(path), point, path, machine)
                rows += rows_of(result, path)
                results[str(path)] = result
                continue
        except ResultError as error:
            problems.append(str(error))
            without = {"status": INVALID, "reason": str(error)}
        rows.append({**_base(point, path), **without})
    table = table_of(rows)
    # An out-of-memory error gives the size of the failed allocation, not the total need.
    failed = (r"needs (\S+ .iB) more", r"could not allocate \1")
    table["reason"] = table["reason"].replace(*failed, regex=True)
    return Results(machine, table, results, tuple(problems))


def rows_of(result: Result, path: Path) -> list[dict[str, Any]]:
    """One row per record; for a result without records, one row with status and reason."""
    base = _base(result, path)
    base["flags"] = (*result.flags, *([UNCOMMITTED] if result.commit["dirty"] else []))
    if result.status != "ok":
        return [{**base, "status": result.status, "reason": result.reason}]
    rows = []
    for record in result.measurements:
        labels = record["labels"]
        if clash := {*labels} & {*FIELDS, *result.parameters, "labels"}:
            raise ResultError(f"{path}: label {sorted(clash)[0]!r} is a parameter or a field")
        own = {**record, **labels}
        del own["labels"]
        rows.append({**base, **_interned(own)})
    return rows


def table_of(rows: list[dict[str, Any]]) -> Rows:
    """Rows as a DataFrame of Python objects, so that 128 stays an integer next to NaN."""
    return pd.DataFrame(rows, columns=list(dict.fromkeys(chain(FIELDS, *rows))), dtype=object)


def _base(of: Point | Result, path: Path) -> dict[str, Any]:
    scalars = {k: v for k, v in of.settings.items() if isinstance(v, str | int | float)}
    named = {k: v for k, v in {**scalars, **of.parameters}.items() if k not in FIELDS}
    return _interned({"chapter": of.chapter, "source": str(path), "flags": (), **named})


def _interned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Intern strings: comparing 100,000 rows is then five times as fast."""
    return {k: intern(v) if isinstance(v, str) else v for k, v in values.items()}


def records(rows: Rows) -> list[dict[str, Any]]:
    """The rows as dictionaries; several times as fast as pandas for columns of Python objects."""
    names = [str(name) for name in rows]
    columns = zip(*(rows[name].tolist() for name in names), strict=True)
    return [dict(zip(names, values, strict=True)) for values in columns]


def select(rows: Rows, **where: Any) -> Rows:
    """Rows that match every condition: a value, a list of allowed values, or a predicate."""
    return _matching(rows, where, np.zeros(len(rows), bool))


def candidates(rows: Rows, **where: Any) -> Rows:
    """Like `select`, but for a row without a value a missing label matches anything: a point that
    ran out of memory belongs in every cell that its records would have filled."""
    return _matching(rows, where, rows["status"].to_numpy() != "ok")


def _matching(rows: Rows, where: Where, lenient: npt.NDArray[np.bool_]) -> Rows:
    left = np.arange(len(rows))
    # The quantity first, which few rows match: comparing objects is slow.
    for key, wanted in sorted(where.items(), key=lambda condition: condition[0] != "quantity"):
        if key not in rows:
            left = left[lenient[left]]
            continue
        found = rows[key].to_numpy()[left]
        matches = _matches(found, wanted)
        lacks = ~matches & lenient[left]
        if lacks.any():
            lacks[lacks] = pd.isna(found[lacks])
        left = left[matches | lacks]
    return rows.iloc[left]


def _matches(found: npt.NDArray[Any], wanted: Any) -> npt.NDArray[np.bool_]:
    if callable(wanted):
        return np.fromiter((bool(wanted(each)) for each in found), bool, len(found))
    if isinstance(wanted, list | tuple | set | frozenset):
        return pd.Series(found, dtype=object).isin(list(wanted)).to_numpy()
    # numpy compares Python objects several times as fast as pandas.
    return np.asarray(found == wanted, bool)


def derived(rows: Rows, name: str, where: Where, value: Value) -> Rows:
    """Append a quantity computed from the matching rows (`value` gets all of them at once). Of the
    statistics, only `noisy` and `stability` are inherited; rows without a value are dropped."""
    chosen = select(rows, status="ok", **where).copy()
    if chosen.empty:
        return rows
    chosen["value"] = value(chosen)
    return _appended(rows, chosen[chosen["value"].notna()], name)


def combine(
    rows: Rows, name: str, parts: Mapping[str, Where], value: Value, on: Sequence[str] = ("source",)
) -> Rows:
    """Append a quantity computed from several others, joined on the fields `on` (by default within
    one point). `value` gets one column per part; other fields come from the first part, the only
    one that may have several rows per key. Rows that lack a part are dropped."""
    found = [select(rows, status="ok", **where).set_index(list(on)) for where in parts.values()]
    first = found[0]
    for part, (statistic, inherited) in product(found[1:], NOISE.items()):
        theirs = part[statistic].reindex(first.index)
        first = first.assign(**{statistic: theirs.where(theirs.isin(inherited), first[statistic])})
    numbers = [pd.to_numeric(part["value"]).reindex(first.index) for part in found]
    columns = pd.DataFrame(dict(zip(parts, numbers, strict=True)))
    complete = columns.notna().all(axis=1)
    if not complete.any():
        return rows
    new = first[complete].reset_index().assign(value=list(value(columns[complete])))
    return _appended(rows, new, name)


def computed(row: Mapping[str, Any], numbers: Mapping[str, Any], **fields: Any) -> Rows:
    """Rows for quantities by name: the fields of `row` but clock and statistics, and `fields`."""
    base = {**row, "clock": None, **NO_STATISTICS, **fields}
    return table_of([{**base, "quantity": k, "value": v} for k, v in numbers.items()])


def highest(rows: Rows, key: Callable[[float], float] = float) -> dict[str, Any] | None:
    """The row with the highest value, or the highest by `key`."""
    return max(records(rows), key=lambda row: key(row["value"]), default=None)


def extremes(rows: Rows) -> dict[str, Any] | None:
    """The number of rows, and the rows with the smallest and the largest value."""
    if rows.empty:
        return None
    ordered = records(rows.sort_values("value", key=pd.to_numeric))
    return {"count": len(ordered), "low": ordered[0], "high": ordered[-1]}


def _appended(rows: Rows, new: Rows, quantity: str) -> Rows:
    new = new.assign(quantity=quantity, unit=None, **NO_STATISTICS)
    return pd.concat([rows, new.astype(object)], ignore_index=True)


def at_first(rows: Rows, name: str) -> Rows:
    """The rows that have the first value of a field; none if no row has the field."""
    return select(rows, **{name: values_of(rows, name)[:1]})


def distinct(rows: Rows, keys: list[str]) -> list[tuple[Any, ...]]:
    """Combinations of keys that occur, in the order of the study."""
    if not set(keys) <= set(rows.columns):  # a label that no measured record has
        return []
    present = rows.dropna(subset=keys) if keys else rows
    return list(dict.fromkeys(zip(*(present[key].tolist() for key in keys), strict=True)))


def values_of(rows: Rows, name: str | None) -> list[Any]:
    """The values of a field in the order of the study; only None if there is no field."""
    return [value for (value,) in distinct(rows, [name])] if name else [None]
