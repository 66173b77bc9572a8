"""`lmlab compare A B`: where the second set of results is faster or slower than the first, or
takes more or less memory.

A set is a folder, a machine in results/, or either at a git revision. What differs between the
machines is printed first, because it is the likeliest explanation; then, per chapter, how many
records differ, the largest differences, and what only one set has.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.chapters.end_to_end.page import NOISE
from lmlab.cli.keys import split
from lmlab.cli.measure import aligned
from lmlab.report.frame import FIELDS, Rows
from lmlab.report.text import DASH, MIB, number, shortened
from lmlab.report.verdict import SLOWER
from lmlab.result_sets.differences import COUNTED, Differences, differences
from lmlab.result_sets.sets import MEMORY, ResultSet, load_set

LARGEST, LISTED = 10, 12
# Unit and divisor of quantities other than times.
UNITS = {"matmul_rate": ("TFLOP/s", 1), "copy_bandwidth": ("GB/s", 1)}
UNITS |= dict.fromkeys(MEMORY, ("MiB", MIB))
NOISE_UNKNOWN = "unknown, no work was repeated; intervals cover the spread within a job only"


def command(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 if the gate finds something slower or lost."""
    where = dict(map(split, arguments.where))
    if len(where) < len(arguments.where):
        raise ValueError(f"--where {' '.join(arguments.where)}; allowed: each key once")
    where |= {k: v for k in ("chapter", "variant") if (v := getattr(arguments, k)) is not None}
    first, second = (load_set(spec) for spec in (arguments.first, arguments.second))
    found = differences(first, second, NOISE, chosen(pd.concat([first.rows, second.rows]), where))
    if arguments.json:
        print(json.dumps(as_json(first, second, found), allow_nan=False))
    else:
        print(*report(first, second, found), sep="\n")
    if arguments.gate is None:
        return 0
    lost = found.lost()
    for row in lost.itertuples():
        print(f"{row.other_status} in B: {row.file}: {row.other_reason}", file=sys.stderr)
    if lost.empty and set(found.pairs["quantity"]) <= set(MEMORY):
        raise ValueError("--fail-if-slower: the sets have no times that can be compared")
    return gate(found.significant(), arguments.gate) or int(not lost.empty)


def chosen(rows: Rows, where: Mapping[str, str]) -> dict[str, list[str]]:
    """The values of each key. What no record has is refused: most likely a typo."""
    values: dict[str, list[str]] = {}
    for key, text in where.items():
        known = set(map(str, rows[key].dropna())) if key in rows else set()
        if not known:
            names = [str(n) for n in rows if n not in FIELDS or n in ("chapter", "clock")]
            raise ValueError(f"{key} = {text!r}: no record has this; allowed: {', '.join(names)}")
        values[key] = [text] if text in known else text.split(",")  # names may contain commas
        if unknown := set(values[key]) - known:
            allowed = ", ".join(sorted(known))
            raise ValueError(f"{key} = {min(unknown)!r}: no record has this; allowed: {allowed}")
    return values


def gate(pairs: Rows, allowed: float | None) -> int:
    """Print every pair that is slower than the regression gate allows; 1 if there are any."""
    if allowed is None or pairs.empty:
        return 0
    slower = pairs[(pairs["verdict"] == SLOWER) & (pairs["ratio"] < 1 / (1 + allowed))]
    for row in slower.to_dict("records"):
        found = f"{row['chapter']} {line(row)}"
        print(f"slower than {100 * allowed:g} % allows: {found}", file=sys.stderr)
    return int(len(slower) > 0)


def line(row: Mapping[Any, Any]) -> str:
    """One pair: verdict, ratio with its interval, and both values."""
    unit, scale = UNITS.get(row["quantity"], ("ms", 1))
    clock = f" ({row['clock']})" if isinstance(row["clock"], str) else ""
    a, b = (number(row[name] / scale) for name in ("value_a", "value_b"))
    values = f"{a} -> {b} {unit}{clock}"
    interval = f"{row['ratio']:.3f}x [{row['low']:.3g}, {row['high']:.3g}]"
    return f"{row['verdict']:<10}{interval}  {row['point']}: {values}"


def report(first: ResultSet, second: ResultSet, found: Differences) -> Iterator[str]:
    """The comparison as lines of text."""
    for name, each in (("A", first), ("B", second)):
        machine = each.facts.get("machine", "nothing readable")
        yield f"{name}: {each.name}, {machine}, {len(each.files)} results"
        yield from shortened([f"   {problem}" for problem in each.problems], LISTED, "  {} more")
    for key, (a, b) in found.differs.items():
        yield f"differs: {key.replace('_', ' ')}: {a} | {b}"
    for key, (a, b) in found.other_work.items():
        yield f"left out, not the same work: {key} = {a} | {b}"
    if found.pairs.empty:
        yield "no record that both have"
        return
    known = [f"{100 * sd:.1f} % ({bound})" for bound, (sd, df) in found.variation.items() if df]
    yield f"\nvariation between processes: {', '.join(known) or NOISE_UNKNOWN}"
    if same := int(found.pairs["identical"].sum()):
        yield f"{same} records are the same measurement in both sets"
    yield ""
    table = [["chapter, clock or memory", "both", *COUNTED, "geometric mean"]]
    for row in found.chapters().to_dict("records"):
        counts = [str(row[name]) for name in ("pairs", *COUNTED)]
        mean = f"{row['geomean']:.3f}x" if math.isfinite(row["geomean"]) else DASH
        table.append([f"{row['chapter']}, {row['clock']}", *counts, mean])
    yield from aligned(table)
    largest = found.largest(LARGEST)
    for chapter, rows in largest[~largest["identical"]].groupby("chapter"):
        yield f"\n{chapter}: largest differences"
        yield from (f"  {line(row)}" for row in rows.to_dict("records"))
    for each, rows in zip((first, second), found.only, strict=True):
        files = Counter(zip(rows["file"], rows["other_status"], strict=True))
        yield from [f"\nonly {each.name}: {rows['file'].nunique()} points"] if files else []
        others = {status: f" (the other: {status})" for _, status in files} | {"missing": ""}
        lines = [f"  {f}: {count} records{others[s]}" for (f, s), count in files.items()]
        yield from shortened(lines, LISTED, "  {} more")


def as_json(first: ResultSet, second: ResultSet, found: Differences) -> dict[str, Any]:
    """The whole comparison; an unbounded end of an interval is null."""
    return {
        **{
            side: {"name": each.name, "facts": dict(each.facts), "problems": list(each.problems)}
            for side, each in (("a", first), ("b", second))
        },
        "differs": found.differs,
        "other_work": found.other_work,
        "chapters": json_rows(found.chapters()),
        "pairs": json_rows(found.pairs),
        "only": {side: json_rows(rows) for side, rows in zip("ab", found.only, strict=True)},
    }


def json_rows(rows: Rows) -> Sequence[Any]:
    """Rows as JSON values; numbers that are not finite become null."""
    return json.loads(rows.to_json(orient="records", double_precision=15))
