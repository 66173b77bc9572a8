"""`lmlab compare A B`: where the second set of results is faster or slower than the first.

A set is a folder, a machine in results/, or either at a git revision. What differs between the
machines is printed first, because it is the likeliest explanation; then, per chapter, how many
records got faster or slower, the largest differences, and what only one set has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from lmlab.chapters.end_to_end import page
from lmlab.cli.configuration import split
from lmlab.cli.measure import aligned
from lmlab.comparison.differences import VERDICTS, Differences, Noise, differences
from lmlab.comparison.sets import ResultSet, load_set
from lmlab.report.frame import Rows
from lmlab.report.text import number

LARGEST, LISTED = 10, 12
FAILED_GATE = 1


def command(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 if the gate finds something slower."""
    where = dict(map(split, arguments.where))
    where |= {k: v for k in ("chapter", "variant") if (v := getattr(arguments, k)) is not None}
    first, second = (load_set(spec) for spec in (arguments.first, arguments.second))
    found = differences(first, second, noise(), where)
    if arguments.json:
        print(json.dumps(as_json(first, second, found), allow_nan=False))
    else:
        print(*report(first, second, found), sep="\n")
    return gate(found, arguments.gate)


def noise() -> Noise:
    """The work that the study repeats in several processes: passes of the model, in two modes."""
    return Noise(
        replicates=page.REPLICATES,
        keys=[*page.POINT, "phase"],
        host_bound_below=page.HOST_BOUND_BELOW,
    )


def gate(found: Differences, allowed: float | None) -> int:
    """Name what got slower than a regression gate allows."""
    if allowed is None:
        return 0
    slower = found.slower(allowed)
    for row in slower.to_dict("records"):
        print(f"slower than {100 * allowed:g} % allows: {row['chapter']} {_line(row)}")
    return FAILED_GATE if len(slower) else 0


def report(first: ResultSet, second: ResultSet, found: Differences) -> list[str]:
    """The comparison in lines for a person."""
    lines = []
    for name, each in (("A", first), ("B", second)):
        machine = each.facts.get("machine", "nothing readable")
        lines.append(f"{name}: {each.name}, {machine}, {len(each.files)} results")
        lines += [f"   {problem}" for problem in each.problems[:LISTED]]
        lines += [f"   {len(each.problems) - LISTED} more"] * (len(each.problems) > LISTED)
    lines += [f"differs: {k.replace('_', ' ')}: {a} | {b}" for k, (a, b) in found.differs.items()]
    for key, (a, b) in found.other_work.items():
        lines.append(f"left out, not the same work: {key} = {a} | {b}")
    if found.pairs.empty:
        return [*lines, "no record that both have"]
    lines += ["", *_noise_lines(found), "", *_chapter_table(found.chapters())]
    largest = found.largest(LARGEST)
    for chapter in dict.fromkeys(found.pairs["chapter"]):
        rows = largest[(largest["chapter"] == chapter) & ~largest["identical"]]
        lines += ["", f"{chapter}: largest differences"] if len(rows) else []
        lines += [f"  {_line(row)}" for row in rows.to_dict("records")]
    for name, rows in found.only.items():
        lines += _only_lines(name, rows)
    return lines


def _noise_lines(found: Differences) -> list[str]:
    same = int(found.pairs["identical"].sum())
    known = {pace: sd for pace, (sd, freedom) in found.variation.items() if freedom}
    shown = ", ".join(f"{100 * sd:.1f} % ({pace})" for pace, sd in known.items())
    lines = [f"variation between processes: {shown}" if known else NOT_KNOWN]
    return lines + [f"{same} records are the same measurement in both sets"] * bool(same)


NOT_KNOWN = (
    "variation between processes: not measured in these sets; intervals hold the spread within a "
    "job only"
)


def _chapter_table(rows: Rows) -> list[str]:
    header = ["chapter, clock", "both", *VERDICTS, "geometric mean"]
    return aligned(
        [
            header,
            *(
                [
                    f"{row['chapter']}, {row['clock']}",
                    *(str(row[name]) for name in ("pairs", *VERDICTS)),
                    f"{row['geomean']:.3f}x",
                ]
                for row in rows.to_dict("records")
            ),
        ]
    )


def _line(row: Any) -> str:
    low, high = (f"{row[name]:.3g}" for name in ("low", "high"))
    unit = {"matmul_rate": "TFLOP/s", "copy_bandwidth": "GB/s"}.get(row["quantity"], "ms")
    clock = f" ({row['clock']})" if isinstance(row["clock"], str) else ""
    values = f"{number(row['value_a'])} -> {number(row['value_b'])} {unit}{clock}"
    return f"{row['verdict']:<10}{row['ratio']:.3f}x [{low}, {high}]  {row['point']}: {values}"


def _only_lines(name: str, rows: Rows) -> list[str]:
    """What one set alone has, by file."""
    files = list(rows.groupby(["file", "other_status"], sort=False))
    lines = [
        f"  {file}: {len(records)} records"
        + ("" if status == "missing" else f" (the other: {status})")
        for (file, status), records in files[:LISTED]
    ]
    lines += [f"  {len(files) - LISTED} more"] * (len(files) > LISTED)
    return ["", f"only {name}: {len(files)} points", *lines] if files else []


def as_json(first: ResultSet, second: ResultSet, found: Differences) -> dict[str, Any]:
    """The whole comparison; an interval without bounds has null."""
    return {
        "a": {"name": first.name, "facts": dict(first.facts), "problems": list(first.problems)},
        "b": {"name": second.name, "facts": dict(second.facts), "problems": list(second.problems)},
        "differs": {key: list(values) for key, values in found.differs.items()},
        "other_work": {key: list(values) for key, values in found.other_work.items()},
        "chapters": _records(found.chapters()),
        "pairs": _records(found.pairs),
        "only": {
            side: _records(rows) for side, rows in zip("ab", found.only.values(), strict=True)
        },
    }


def _records(rows: Rows) -> Sequence[Any]:
    found: Sequence[Any] = json.loads(rows.to_json(orient="records", double_precision=15))
    return found
