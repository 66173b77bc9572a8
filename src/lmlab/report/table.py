"""A table is a declaration: which rows, which columns, which filter, which format.

    Table("Step time, {precision}", facet="precision", rows=["size", "context"],
          columns={"Forward (ms)": time(phase="forward"), "Step (ms)": time(phase="total")})

Cells without a value say why (OOM, unsupported, not measured); reasons, marks for noisy or
power-capped values, and the number of samples become the line below the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from lmlab.report.frame import FIELDS, UNCOMMITTED, Rows, candidates, distinct
from lmlab.report.text import DASH, escape, markdown_table, plain, quoted, unsteady

STATUS_CELLS = {
    "oom": "OOM",
    "unsupported": "unsupported",
    "failed": "failed",
    "missing": "not measured",
    "invalid": "unreadable",
}
# What a cell knows of its row besides the key of the table.
CONTEXT = ("precision",)
EXPLAINED = ("oom", "unsupported", "failed")
CLOCKS = {"wall": "wall time", "events": "CUDA events", "device": "device time"}
MARKS = {
    "↕": "drifting or in two groups; the middle half of the samples is given",
    "~": "the middle half of the samples spans more than 10 %",
    "†": "power-capped or throttled",
    "‡": "inconsistent: far more than the sum of its parts timed apart",
    "§": "measured with uncommitted code",
}
FLAG_MARKS = {"power_capped": "†", "throttled": "†", "inconsistent": "‡"}
MAX_REASONS = 4


@dataclass(frozen=True)
class Column:
    """One column: which record fills it, and how it is printed."""

    where: Mapping[str, Any]
    format: str = "number"
    field: str = "value"


def time(
    format: str = "ms", clock: str | Sequence[str] = "wall", field: str = "value", **where: Any
) -> Column:
    """A time; wall clock unless it says otherwise."""
    return Column({"quantity": "time", "clock": clock, **where}, format, field)


def quantity(name: str, format: str = "number", field: str = "value", **where: Any) -> Column:
    """Any other quantity by name."""
    return Column({"quantity": name, **where}, format, field)


def memory(name: str = "peak_memory", format: str = "GiB", **where: Any) -> Column:
    """Bytes, in GiB."""
    return Column({"quantity": name, **where}, format)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A declared table; `render` turns rows into Markdown."""

    title: str
    """May name the facet's value: "Step time, {precision}"."""
    rows: Sequence[str]
    columns: Mapping[str, Column]
    """By header. With `across` a header may contain the value: "{context}"."""
    where: Mapping[str, Any] = field(default_factory=dict)
    chapter: str | None = None
    """Whose rows to take, if not the chapter's own: "published", or another chapter."""
    facet: str | None = None
    across: str | None = None
    """A field whose values become columns."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names for the row fields, where the field's own name is not what a reader expects."""
    note: str = ""
    limit: int | None = None
    data: Callable[[Rows], Rows] | None = None
    """Prepares the rows, where a declaration is not enough."""

    def render(self, rows: Rows) -> Markup:
        """Markdown of one table, or one per facet; empty if there is nothing to show."""
        if self.data is not None:
            rows = self.data(rows)
        rows = candidates(rows, **self.where)
        if rows.empty:
            return Markup("")
        if self.facet is None:
            return Markup(self._one(rows, {}))
        facets = [value for (value,) in distinct(rows, [self.facet])]
        parts = [
            self._one(candidates(rows, **{self.facet: value}), {self.facet: value})
            for value in facets
        ]
        return Markup("\n\n".join(part for part in parts if part))

    def cells(self, sides: Sequence[Rows]) -> dict[tuple[Any, ...], list[Cell]]:
        """The cells of several sets of rows, side by side: by facet, row key and column header,
        whichever of them has it."""
        whole = replace(self, rows=[*([self.facet] if self.facet else []), *self.rows])
        shown = [
            candidates(rows if self.data is None else self.data(rows), **self.where)
            for rows in sides
        ]
        keys = dict.fromkeys(key for rows in shown for key in distinct(rows, list(whole.rows)))
        indexes = [whole._indexes(rows) for rows in shown]
        headers = dict.fromkeys(header for index in indexes for header in index)
        nothing = Cell(Column({}), None)
        return {
            (*key, header): [
                index[header].cell(key) if header in index else nothing for index in indexes
            ]
            for key in keys
            for header in headers
        }

    def _one(self, rows: Rows, facet: Mapping[str, Any]) -> str:
        indexes = self._indexes(rows)
        lines: list[list[str]] = []
        used: list[Cell] = []
        for key in distinct(rows, list(self.rows))[: self.limit]:
            cells = [index.cell(key) for index in indexes.values()]
            if all(cell.row is None for cell in cells):
                continue
            used += cells
            lines.append(
                [*(escape(plain(value)) for value in key), *(cell.text() for cell in cells)]
            )
        if not lines:
            return ""
        names = [self.headers.get(name, name.replace("_", " ")) for name in self.rows]
        header = [escape(name) for name in [*names, *indexes]]
        caption = self._caption(used, facet)
        return f"{markdown_table(header, lines, len(self.rows))}\n\n*{caption}*"

    def _indexes(self, rows: Rows) -> dict[str, _Index]:
        """What may fill each column, by its header."""
        filled = [
            (header, column, candidates(rows, **column.where))
            for header, column in self.columns.items()
        ]
        if self.across is None:
            return {header: _Index(found, column, self.rows) for header, column, found in filled}
        return {
            header.format(**{self.across: value}): _Index(
                candidates(found, **{self.across: value}), column, self.rows
            )
            for (value,) in distinct(rows, [self.across])
            for header, column, found in filled
        }

    def _caption(self, cells: Sequence[Cell], facet: Mapping[str, Any]) -> str:
        parts = [escape(self.title.format(**facet)), *([self.note] if self.note else [])]
        found = [cell.row for cell in cells if cell.row is not None and cell.row["status"] == "ok"]
        clocks = dict.fromkeys(row["clock"] for row in found if row["clock"] in CLOCKS)
        counts = sorted({int(row["n"]) for row in found if not pd.isna(row["n"]) and row["n"]})
        if clocks:
            samples = _range(counts)
            center = "mean" if any(cell.column.field == "mean" for cell in cells) else "median"
            median = f", {center} of {samples}" if samples and counts != [1] else ""
            names = " and ".join(CLOCKS[clock] for clock in clocks)
            parts.append(names[0].upper() + names[1:] + median)
        marks = dict.fromkeys(mark for cell in cells for mark in cell.marks())
        parts += [f"{mark} {MARKS[mark]}" for mark in marks]
        parts += _reasons(cells)
        return ". ".join(part.rstrip(".") for part in parts) + "."


@dataclass(frozen=True)
class Cell:
    """One cell: the row that fills it, if any."""

    column: Column
    row: Mapping[str, Any] | None

    def text(self) -> str:
        if self.row is None:
            return DASH
        if self.row["status"] != "ok":
            return escape(self.row["reason"]) if self.one_word else STATUS_CELLS[self.row["status"]]
        value = self.row.get(self.column.field)
        if value is None or pd.isna(value):
            return DASH
        text = quoted(self.row, self.column.format, self.column.field)
        return escape(text) + "".join(self.marks())

    @property
    def one_word(self) -> bool:
        """Whether the reason is short enough to be the cell: "overflow"."""
        return self.row is not None and len(str(self.row["reason"]).split()) == 1

    def marks(self) -> list[str]:
        if self.row is None or self.row["status"] != "ok":
            return []
        flags = self.row["flags"] if isinstance(self.row["flags"], tuple) else ()
        marks = ["§"] * (UNCOMMITTED in flags)
        if self.row.get("clock") in CLOCKS:
            spread = ["↕"] if unsteady(self.row) else ["~"] * (self.row["noisy"] is True)
            marks = [*spread, *(FLAG_MARKS[flag] for flag in flags if flag in FLAG_MARKS), *marks]
        return list(dict.fromkeys(marks))


class _Index:
    """The rows that may fill one column, by the table's row key."""

    def __init__(self, rows: Rows, column: Column, keys: Sequence[str]) -> None:
        self.column = column
        self.exact: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
        self.partial: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        used = [
            name for name in dict.fromkeys([*FIELDS, *CONTEXT, *keys, column.field]) if name in rows
        ]
        for values in zip(*(rows[name].tolist() for name in used), strict=True):
            row = dict(zip(used, values, strict=True))
            key = tuple(row.get(name) for name in keys)
            if row["status"] == "ok" or not any(map(pd.isna, key)):
                self.exact[key].append(row)
            else:
                self.partial.append((key, row))

    def cell(self, key: tuple[Any, ...]) -> Cell:
        """The cell of one table row: a measured value, or a row that says why there is none."""
        found = self.exact.get(key, [])
        measured = [row for row in found if row["status"] == "ok"]
        if len(measured) > 1:
            raise ValueError(f"table cell {dict(self.column.where)}: {len(measured)} rows match")
        reasons = (
            row
            for partial, row in self.partial
            if all(pd.isna(a) or a == b for a, b in zip(partial, key, strict=True))
        )
        return Cell(self.column, next(iter([*measured, *found]), None) or next(reasons, None))


def _range(counts: Sequence[int]) -> str:
    if not counts:
        return ""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Why cells are empty, each reason once."""
    lines: dict[str, None] = {}
    for cell in cells:
        if cell.row is not None and cell.row["status"] in EXPLAINED and not cell.one_word:
            lines[f"{STATUS_CELLS[cell.row['status']]}: {escape(cell.row['reason'])}"] = None
    shown = list(lines)[:MAX_REASONS]
    return [
        *shown,
        *([f"{len(lines) - len(shown)} more reasons in the results"] * (len(lines) > len(shown))),
    ]
