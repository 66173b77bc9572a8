"""Machines side by side: a table and a figure per question of the front page.

Nothing is declared twice: one column of each front-page table is evaluated for every machine, and
the machines become the columns. Published figures appear as machines of their own. A wall time is
shown with the device time of the same work, and machines are compared by device time where both
have it, because the wall time of a host-bound step measures the host. Next to the ratio of two
times is the ratio of the ceilings that may explain it: matmul rates in the precision of the row,
and copy bandwidths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lmlab.report.compare import Noise, Variation, count_of, unpaired
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, table_of
from lmlab.report.table import MARKS, Cell, Column, Table
from lmlab.report.text import DASH, NOT_STATED, SCALES, escape, markdown_table, number, plain, times
from lmlab.report.verdict import interval
from lmlab.result_sets.differences import bound_of
from lmlab.study.files import TEMPLATES

MAX_ROWS, MAX_BARS = 30, 12
# One column of each table is shown: the first with a format of the earliest group.
PREFERRED = (("ms", "us", "s"), ("percent", "times"), ("number", "integer", "GiB", "digits"))
# Of rows that differ only in one of these, the longest that most machines have is kept.
LENGTHS = ("context", "sequence")
COPY = "copy"
# A larger ratio of highest to lowest value is drawn on a logarithmic axis.
FAR_APART = 30

Entries = dict[tuple[Any, ...], list[Cell]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One column of the comparison."""

    name: str
    chapters: Mapping[str, Rows]  # measured and derived rows by chapter
    ceilings: Mapping[str, float]
    """TFLOP/s by precision, and GB/s under `copy`: measured, of a published machine as stated."""
    stated: Mapping[str, float]  # the same, as stated by the vendor
    published: bool = False

    def ceiling_over(self, first: Machine, name: str) -> float | None:
        """Ratio of a ceiling to another machine's; for a published machine, both as stated."""
        mine = self.ceilings.get(name)
        theirs = (first.stated if self.published else first.ceilings).get(name)
        return mine / theirs if mine and theirs else None

    def over(self, first: Machine) -> str:
        """The column header of a ratio to another machine."""
        short = (m.name.removeprefix("NVIDIA ").removesuffix(", published") for m in (self, first))
        return " / ".join(short)


@dataclass(frozen=True)
class Question:
    """A heading of the front page with the table that answers it."""

    heading: str
    chapter: str
    table: Table


@dataclass
class Section:
    """A question with all machines side by side: one column of its table."""

    question: Question
    machines: Sequence[Machine]
    noise: Noise
    variation: Mapping[str, Variation]  # between processes, by bound
    column: str | None = None

    def __post_init__(self) -> None:
        machines, table = self.machines, self.question.table
        formats = {name: shown.format for name, shown in table.columns.items()}
        preferred = [name for group in PREFERRED for name in formats if formats[name] in group]
        header = self.column or [*preferred, *formats][0]
        chosen = table.columns[header]
        sides = [m.chapters.get(self.question.chapter, table_of([])) for m in machines]
        measured = sum(not machine.published for machine in machines)  # these come first

        def entries(column: Column) -> Entries:
            return {
                key if table.across else key[:-1]: cells
                for key, cells in replace(table, columns={header: column}).cells(sides).items()
                if np.isfinite(_values(cells[:measured])).any()
            }

        keys = [name for name in (table.facet, *table.rows, table.across) if name]
        self.keys = [table.headers.get(name, name.replace("_", " ")) for name in keys]
        self.entries, self.left_out = _reduced(entries(chosen), keys)
        device = replace(chosen, where={**chosen.where, "clock": "device"})
        busy = entries(device) if chosen.where.get("clock") == "wall" else {}
        nothing = [Cell(device, None)] * len(machines)
        self.device = {key: busy.get(key, nothing) for key in self.entries}
        self.values = {key: _values(cells) for key, cells in self.entries.items()}
        plain_number = chosen.format in ("number", "digits", "integer") and table.across is None
        self.unit = header if plain_number else {"text": "x"}.get(chosen.format, chosen.format)

    @property
    def timed(self) -> bool:
        return self.unit in PREFERRED[0]

    @property
    def identical(self) -> bool:
        """Whether all machines have the same value in every row, so there is nothing to compare."""
        return all(len(row) > 1 and (row == row[0]).all() for row in self.values.values())

    def markdown(self) -> Markup:
        """The table, with the first machine as the baseline."""
        first = self.machines[0]
        others = list(enumerate(self.machines))[1:] if not self.identical else []
        rows = self.values.values()
        shown = [(place, m) for place, m in others if any(np.isfinite(row[place]) for row in rows)]
        precisions = set(map(_precision, self.entries.values())) if self.timed else ()
        bound = [m for _, m in shown if any(m.ceiling_over(first, p) for p in precisions)]
        header = [*self.keys, *(m.name for m in self.machines)]
        header += [("speed, " if self.timed else "") + m.over(first) for _, m in shown]
        header += [f"matmul, copy: {m.over(first)}" for m in bound]
        lines = []
        for key, cells in self.entries.items():
            line = [escape(plain(part)) for part in key]
            for cell, device, machine in zip(cells, self.device[key], self.machines, strict=True):
                text = NOT_STATED if cell.row is None and machine.published else cell.text()
                line.append(text + f" ({device.text()})" * math.isfinite(_value(device)))
            line += [self._ratio(key, place) for place, _ in shown]
            for m in bound:
                ratios = [m.ceiling_over(first, name) for name in (_precision(cells), COPY)]
                line.append(", ".join(times(ratio) if ratio else NOT_STATED for ratio in ratios))
            lines.append(line)
        notes = [f"{self.left_out} more rows are on the machines' own pages"] * bool(self.left_out)
        notes += ["The same on all machines"] * self.identical
        device_cells = [cell for cells in self.device.values() for cell in cells]
        notes += ["In parentheses: by device time"] * any(cell.measured for cell in device_cells)
        every = (cell for cells in (*self.entries.values(), device_cells) for cell in cells)
        marks = dict.fromkeys(mark for cell in every for mark in cell.marks)
        notes += [f"{mark} {MARKS[mark]}" for mark in marks]
        title = re.sub(r"\{(\w+)\}", r"each \1", self.question.table.title)
        caption = ". ".join([f"{escape(title)}: {escape(self.unit)}", *notes])
        return Markup(f"{markdown_table(header, lines, len(self.keys))}\n\n*{caption}.*")

    def _ratio(self, key: tuple[Any, ...], place: int) -> str:
        """Ratio of a machine's value to the first machine's; for times, of their speeds, or the
        verdict if undecided. Device times are compared where both have them."""
        cells, device = ([each[key][0], each[key][place]] for each in (self.entries, self.device))
        values, busy = _values(cells), _values(device)
        compared = device if np.isfinite(busy).all() else cells
        a, b = _values(compared)
        if not (a > 0 and b > 0):
            return DASH
        if not self.timed:
            return times(b / a)
        if self.machines[place].published:
            return times(a / b)
        rows = [cell.row or {} for cell in compared]
        bounds = bound_of([row["clock"] for row in rows], busy / values, self.noise)
        variations = [self.variation[bound] for bound in bounds]
        if max(map(count_of, rows)) < 2 and not any(df for _, df in variations):
            return times(a / b)  # single values of unknown variation: no interval
        found = interval(*unpaired(rows[1], rows[0], *variations))
        return times(found.ratio) if found.decided else found.verdict

    def figure(self, path: Path) -> bool:
        """Grouped bars of the rows that most machines have; False if there is nothing to draw."""
        scale = {**SCALES, "percent": 100.0}.get(self.unit, 1.0)
        device = {key: _values(cells) for key, cells in self.device.items()}
        by_device = any(np.isfinite(values).sum() > 1 for values in device.values())
        shown = device if by_device else self.values
        count = {key: np.isfinite(values).sum() for key, values in shown.items()}
        drawn = [key for key in shown if count[key] == max(count.values())][:MAX_BARS]
        rows: list[dict[str, Any]] = [
            {"point": "\n".join(map(str, key)), "machine": m.name, "value": value * scale}
            for key in drawn
            for value, m in zip(shown[key], self.machines, strict=True)
            if value > 0
        ]
        if not rows or self.identical:
            return False
        values = [row["value"] for row in rows]
        far = max(values) / min(values) > FAR_APART
        unit = {"percent": "%", "number": "", "digits": "", "integer": ""}.get(self.unit, self.unit)
        figure = Figure(
            title=self.question.heading,
            mark="bar",
            x=Axis(field="point", title="", categorical=True),
            y=Axis(unit + ", device time" * by_device, log=10 if far else None),
            color="machine",
            data=lambda _: table_of(rows),
        )
        return figure.draw(Results("", table_of([])), path)


def questions(
    chapters: Sequence[str], tables: Callable[[str], Mapping[str, Table]], own: Mapping[str, Table]
) -> Iterator[Question]:
    """Headings of the front page in the order of the study, each with its table in `own` or else
    the first one below it."""
    for chapter in chapters:
        file = TEMPLATES / "front" / f"{chapter}.md.j2"
        text = file.read_text() if file.exists() else ""
        for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
            heading = part.partition("\n")[0].strip()
            found = re.search(r'(\w+)\.table\("(\w+)"\)', part)
            owner = chapter if not found or found[1] == "chapter" else found[1]
            table = own.get(heading) or (found and tables(owner).get(found[2]))
            if table:
                yield Question(heading, owner, table)


def _reduced(found: Entries, keys: Sequence[str]) -> tuple[Entries, int]:
    """Select at most MAX_ROWS rows that two machines have (or else one), and count the rest. From
    many rows that differ only in a length, keep the one most machines have, then the longest."""
    count = {key: np.isfinite(_values(cells)).sum() for key, cells in found.items()}
    enough = 2 if max(count.values(), default=0) > 1 else 1
    shared = chosen = [key for key in found if count[key] >= enough]
    for name in LENGTHS:
        if name in keys and len(chosen) > MAX_BARS:
            place = list(keys).index(name)
            best: dict[Any, tuple[Any, ...]] = {}
            for key in sorted(chosen, key=lambda key: (count[key], float(key[place]))):
                best[key[:place], key[place + 1 :]] = key
            chosen = [key for key in chosen if key in best.values()]
    return {key: found[key] for key in chosen[:MAX_ROWS]}, len(shared) - len(chosen[:MAX_ROWS])


def _value(cell: Cell) -> float:
    """The number in a cell; NaN if there is none."""
    value = cell.row["value"] if cell.row is not None and cell.measured else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _values(cells: Sequence[Cell]) -> npt.NDArray[np.float64]:
    return np.array([_value(cell) for cell in cells])


def _precision(cells: Sequence[Cell]) -> str:
    return next((str(cell.row.get("precision")) for cell in cells if cell.row is not None), "")


def ceilings(machines: Sequence[Machine]) -> Markup:
    """Matmul rates and copy bandwidth of all machines, and their ratios to the first."""
    shown = [machine for machine in machines if machine.ceilings]
    first, *others = shown
    rates = {name for machine in shown for name in machine.ceilings} - {COPY}
    lines = []
    for name in [*sorted(rates), COPY]:
        line = ["copy (GB/s)" if name == COPY else f"matmul, {name} (TFLOP/s)"]
        for machine in shown:
            value, note = machine.ceilings.get(name), " stated" * machine.published
            line.append(NOT_STATED if value is None else f"{number(float(value))}{note}")
        ratios = [machine.ceiling_over(first, name) for machine in others]
        lines.append([*line, *(DASH if ratio is None else times(ratio) for ratio in ratios)])
    header = ["ceiling", *(m.name for m in shown), *(m.over(first) for m in others)]
    note = "*Measured; for published machines the vendor's figures, also in ratios.*"
    return Markup(f"{markdown_table(header, lines, 1)}\n\n{note}")
