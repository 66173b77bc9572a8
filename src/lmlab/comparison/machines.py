"""Machines side by side: a table and a figure per question of the front page.

Nothing is declared twice: the front page's own tables are read for every machine, one column of
each is shown, and the machines become the columns. Published figures take part as machines of their
own. Next to the ratio of two times stands the ratio of the ceilings that may explain it: matmul
rates in the precision of the row, and copy bandwidths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from lmlab.report.compare import FASTER, SLOWER, unpaired
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, select, table_of
from lmlab.report.table import MARKS, Cell, Column, Table
from lmlab.report.text import escape, markdown_table, number, plain, times

MAX_ROWS, MAX_BARS = 30, 12
# A table shows one column here; the first of these formats that it has.
PREFERRED = (("ms", "us", "s"), ("percent", "times"), ("number", "integer", "GiB", "digits"))
# Rows that differ in these alone are reduced to the longest that two machines share.
LENGTHS = ("context", "sequence")
SCALES = {"GiB": 2.0**-30, "MiB": 2.0**-20, "us": 1e3, "s": 1e-3, "percent": 100.0}
NOT_STATED, NOTHING = "not stated", "–"
COPY = "copy"
# Values further apart than this are drawn on a logarithmic axis.
FAR_APART = 30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One column of the comparison."""

    name: str
    chapters: Mapping[str, Rows]
    """Measured and derived rows by chapter."""
    measured: Mapping[str, float]
    """Ceilings: TFLOP/s by precision, and GB/s under `copy`; none of a published machine."""
    stated: Mapping[str, float]
    """The same as the vendor states them."""
    published: bool = False

    @property
    def short(self) -> str:
        return self.name.removeprefix("NVIDIA ").removesuffix(", published")

    @property
    def ceilings(self) -> Mapping[str, float]:
        return self.stated if self.published else self.measured

    def ceiling_over(self, first: Machine, name: str) -> float | None:
        """The ratio of a ceiling to another machine's: stated to stated if nothing is measured."""
        theirs = first.stated if self.published else first.ceilings
        if not theirs.get(name) or not self.ceilings.get(name):
            return None
        return self.ceilings[name] / theirs[name]


@dataclass(frozen=True)
class Question:
    """A heading of the front page with the table that answers it."""

    heading: str
    chapter: str
    table: Table


@dataclass(frozen=True)
class Section:
    """A question with all machines side by side."""

    question: Question
    keys: Sequence[str]
    unit: str
    entries: Mapping[tuple[Any, ...], Sequence[Cell]]
    left_out: int = 0
    variation: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def markdown(self, machines: Sequence[Machine]) -> Markup:
        """The table; the first machine is what the others are compared with."""
        first, *others = machines
        shown = [m for m in others if self._has(machines.index(m)) and not self.identical]
        bound = [m for m in shown if self.timed and self._bounds(first, m)]
        what = "speed, " if self.timed else ""
        header = [*self.keys, *(m.name for m in machines)]
        header += [f"{what}{m.short} / {first.short}" for m in shown]
        header += [f"matmul, copy: {m.short} / {first.short}" for m in bound]
        lines = []
        for key, cells in self.entries.items():
            line = [escape(plain(part)) for part in key]
            line += [_text(cell, m) for cell, m in zip(cells, machines, strict=True)]
            line += [self._ratio(cells[0], cells[machines.index(m)], m) for m in shown]
            line += [_ceilings(first, m, cells) for m in bound]
            lines.append(line)
        notes = [f"{self.left_out} more rows are on the machines' own pages"] * bool(self.left_out)
        notes += ["The same on all machines"] * self.identical
        shown_cells = (cell for cells in self.entries.values() for cell in cells)
        marks = dict.fromkeys(mark for cell in shown_cells for mark in cell.marks())
        notes += [f"{mark} {MARKS[mark]}" for mark in marks]
        title = re.sub(r"\{(\w+)\}", r"each \1", self.question.table.title)
        caption = ". ".join([f"{escape(title)}: {escape(self.unit)}", *notes])
        return Markup(f"{markdown_table(header, lines, len(self.keys))}\n\n*{caption}.*")

    @property
    def timed(self) -> bool:
        return self.unit in PREFERRED[0]

    @property
    def identical(self) -> bool:
        """Whether every row has one value, on two machines or more: nothing to compare."""
        values = [[_value(cell) for cell in cells] for cells in self.entries.values()]
        return all(len(row) > 1 and None not in row and len(set(row)) == 1 for row in values)

    def _has(self, index: int) -> bool:
        return any(_value(cells[index]) is not None for cells in self.entries.values())

    def _bounds(self, first: Machine, other: Machine) -> bool:
        """Whether a ratio of matmul rates is known for some row."""
        rows = self.entries.values()
        return any(other.ceiling_over(first, _precision(cells)) is not None for cells in rows)

    def _ratio(self, ours: Cell, theirs: Cell, machine: Machine) -> str:
        """The other machine's value over ours; where it is a time, the speed, with its verdict."""
        a, b = _value(ours), _value(theirs)
        if not a or not b or min(a, b) <= 0:
            return NOTHING
        rows = [cell.row or {} for cell in (theirs, ours)]
        samples = [row.get("samples") for row in rows]
        if not self.timed:
            return times(b / a)
        if machine.published or not all(isinstance(each, list | tuple) for each in samples):
            return times(a / b)
        between, df = self.variation.get(str(rows[0].get("clock")), (0.0, math.inf))
        variant, baseline = ([float(x) for x in each or ()] for each in samples)
        interval = unpaired(variant, baseline, between=between * math.sqrt(2), df=df)
        decided = interval.verdict in (FASTER, SLOWER)
        return times(interval.ratio) if decided else interval.verdict

    def figure(self, machines: Sequence[Machine], path: Path) -> bool:
        """Grouped bars of the rows that most machines have; False if there is nothing to draw."""
        scale = SCALES.get(self.unit, 1.0)
        count = {
            key: sum(_value(c) is not None for c in cells) for key, cells in self.entries.items()
        }
        drawn = [key for key in self.entries if count[key] == max(count.values())][:MAX_BARS]
        rows = [
            {"point": "\n".join(map(str, key)), "machine": m.name, "value": value * scale}
            for key in drawn
            for cell, m in zip(self.entries[key], machines, strict=True)
            if (value := _value(cell)) is not None and value > 0
        ]
        if not rows or self.identical:
            return False
        values: list[Any] = [row["value"] for row in rows]
        far = max(values) / min(values) > FAR_APART
        unit = {"percent": "%", "number": "", "digits": "", "integer": ""}.get(self.unit, self.unit)
        figure = Figure(
            title=self.question.heading,
            mark="bar",
            x=Axis(field="point", title="", categorical=True),
            y=value_axis(unit, log=10 if far else None),
            color="machine",
            data=lambda _: table_of(rows),
        )
        return figure.draw(Results("", table_of([])), path)


def questions(
    templates: Path, chapters: Sequence[str], tables: Callable[[str], Mapping[str, Table]]
) -> Iterator[Question]:
    """Headings of the front page and the first table below each, in the order of the study."""
    for chapter in chapters:
        file = templates / "front" / f"{chapter}.md.j2"
        text = file.read_text() if file.exists() else ""
        for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
            heading = part.partition("\n")[0].strip()
            if found := re.search(r'(\w+)\.table\("(\w+)"\)', part):
                owner = chapter if found[1] == "chapter" else found[1]
                if found[2] in tables(owner):
                    yield Question(heading, owner, tables(owner)[found[2]])


def section(
    question: Question,
    machines: Sequence[Machine],
    column: str | None = None,
    variation: Mapping[str, tuple[float, float]] | None = None,
) -> Section:
    """The chosen column of a question's table for all machines."""
    header, chosen = _chosen(question.table, column)
    table = replace(question.table, columns={header: chosen})
    sides = [m.chapters.get(question.chapter, table_of([])) for m in machines]
    found = {
        key: cells
        for key, cells in table.cells(sides).items()
        if any(_value(cell) is not None for cell in cells[: _measured(machines)])
    }
    keys = [*([table.facet] if table.facet else []), *table.rows]
    if table.across is None:
        found = {key[:-1]: cells for key, cells in found.items()}
    else:
        keys = [*keys, table.across]
    shared, left_out = _reduced(found, keys)
    names = [table.headers.get(name, name.replace("_", " ")) for name in keys]
    plain_number = chosen.format in ("number", "digits", "integer") and table.across is None
    unit = header if plain_number else {"text": "x"}.get(chosen.format, chosen.format)
    return Section(question, names, unit, shared, left_out, variation or {})


def _measured(machines: Sequence[Machine]) -> int:
    """How many machines come before the published ones."""
    return sum(not machine.published for machine in machines)


def _chosen(table: Table, column: str | None) -> tuple[str, Column]:
    if column in table.columns:
        return str(column), table.columns[str(column)]
    for formats in PREFERRED:
        for header, each in table.columns.items():
            if each.format in formats:
                return header, each
    return next(iter(table.columns.items()))


def _reduced(
    found: Mapping[tuple[Any, ...], list[Cell]], keys: Sequence[str]
) -> tuple[dict[tuple[Any, ...], list[Cell]], int]:
    """Rows that two machines have, else those that one has; at most so many."""
    count = _counts(found)
    enough = 2 if max(count.values(), default=0) > 1 else 1
    chosen = {key: cells for key, cells in found.items() if count[key] >= enough}
    for name in LENGTHS:
        if name in keys and len(chosen) > MAX_BARS:
            chosen = _longest(chosen, count, list(keys).index(name))
    shown = dict(list(chosen.items())[:MAX_ROWS])
    return shown, sum(number >= enough for number in count.values()) - len(shown)


def _counts(entries: Mapping[tuple[Any, ...], Sequence[Cell]]) -> dict[tuple[Any, ...], int]:
    """How many machines have a value for each row."""
    return {key: sum(_value(c) is not None for c in cells) for key, cells in entries.items()}


def _longest(
    chosen: Mapping[tuple[Any, ...], list[Cell]], count: Mapping[tuple[Any, ...], int], place: int
) -> dict[tuple[Any, ...], list[Cell]]:
    """Of rows that differ in a length alone the one that most machines have, then the longest."""
    best: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for key in chosen:
        rest = (*key[:place], *key[place + 1 :])
        best[rest] = max(best.get(rest, key), key, key=lambda k: (count[k], float(k[place])))
    return {key: cells for key, cells in chosen.items() if key in best.values()}


def _value(cell: Cell) -> float | None:
    value = cell.row["value"] if cell.row is not None and cell.row["status"] == "ok" else None
    if isinstance(value, bool) or not isinstance(value, int | float) or pd.isna(value):
        return None
    return float(value)


def _text(cell: Cell, machine: Machine) -> str:
    if cell.row is None:
        return NOT_STATED if machine.published else NOTHING
    return cell.text()


def _precision(cells: Sequence[Cell]) -> str:
    return next((str(cell.row.get("precision")) for cell in cells if cell.row is not None), "")


def _ceilings(first: Machine, other: Machine, cells: Sequence[Cell]) -> str:
    """Ratios of the ceilings that bound a time: arithmetic in its precision, and memory."""
    ratios = [other.ceiling_over(first, name) for name in (_precision(cells), COPY)]
    return ", ".join(NOT_STATED if ratio is None else times(ratio) for ratio in ratios)


def ceilings(machines: Sequence[Machine]) -> Markup:
    """Matmul rates and copy bandwidth of all machines, and their ratios to the first."""
    first, *others = [m for m in machines if m.ceilings]
    names = sorted({name for m in (first, *others) for name in m.ceilings}, key=_order)
    lines = []
    for name in names:
        line = ["copy (GB/s)" if name == COPY else f"matmul, {name} (TFLOP/s)"]
        for machine in (first, *others):
            value = machine.ceilings.get(name)
            note = " stated" if machine.published else ""
            line.append(NOT_STATED if value is None else f"{number(float(value))}{note}")
        ratios = [machine.ceiling_over(first, name) for machine in others]
        lines.append(line + [NOTHING if ratio is None else times(ratio) for ratio in ratios])
    header = ["ceiling", *(m.name for m in (first, *others))]
    header += [f"{m.short} / {first.short}" for m in others]
    note = "*Measured; of published machines as the vendor states them, also in their ratios.*"
    return Markup(f"{markdown_table(header, lines, 1)}\n\n{note}")


def _order(name: str) -> tuple[bool, str]:
    return name == COPY, name


def ceilings_of(rows: Rows, prefix: str = "") -> dict[str, float]:
    """The machine card's measured ceilings, or its `stated_` ones."""
    card = select(rows, chapter="machine", status="ok")
    rates = select(card, quantity=f"{prefix}matmul_rate")
    copy = select(card, quantity=f"{prefix}bandwidth" if prefix else "copy_bandwidth")
    found = dict(zip(rates["dtype"], rates["value"], strict=True)) if len(rates) else {}
    return found | ({COPY: copy["value"].iloc[0]} if len(copy) else {})
