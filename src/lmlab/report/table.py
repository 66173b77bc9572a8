"""A table is a declaration: which rows, which columns, which filter, which format.

    Table(title="Step time, {precision}", rows=["size", "context"],
          columns={"Forward (ms)": time(phase="forward"), "Step (ms)": time(phase="total")})

Cells without a value say why (OOM, unsupported, not measured). The caption below the table gives
reasons, the marks for noisy or power-capped values, the number of samples, and labels that all rows
share. Empty columns are dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from string import Formatter
from typing import Any

import pandas as pd
from markupsafe import Markup

from lmlab.report.frame import UNCOMMITTED, Rows, candidates, distinct, records, values_of
from lmlab.report.text import DASH, escape, grouped_reasons, markdown_table, plain, quoted, unsteady

EXPLAINED = {"oom": "OOM", "unsupported": "unsupported", "failed": "failed"}
STATUS_CELLS = {**EXPLAINED, "missing": "not measured", "invalid": "unreadable"}
CLOCKS = {"wall": "wall time", "events": "CUDA events", "device": "device time"}
CLOCKS |= {"timeline": "the profiler's timeline"}
MARKS = {
    "↕": "drifting or bimodal",
    "~": "noisy",
    "†": "power-capped or throttled run",
    "‡": "inconsistent: far more than the sum of its separately timed parts",
    "§": "measured with uncommitted code",
}
FLAG_MARKS = {"power_capped": "†", "throttled": "†", "inconsistent": "‡", UNCOMMITTED: "§"}


@dataclass(frozen=True)
class Column:
    """One column: which record fills it, and how it is printed."""

    where: Mapping[str, Any]
    format: str = "number"
    field: str = "value"


def time(
    format: str = "ms", clock: str | Sequence[str] = "wall", field: str = "value", **where: Any
) -> Column:
    """A column of times, by wall clock unless another is given."""
    return Column({"quantity": "time", "clock": clock, **where}, format, field)


def quantity(name: str, format: str = "number", field: str = "value", **where: Any) -> Column:
    """A column of any other quantity."""
    return Column({"quantity": name, **where}, format, field)


def memory(name: str = "peak_memory", format: str = "GiB", **where: Any) -> Column:
    """A column of bytes, shown in GiB by default."""
    return Column({"quantity": name, **where}, format)


def speedup(**where: Any) -> Column:
    """A column of ratios: intervals where wide, and the verdict where not faster or slower."""
    return Column({"quantity": "speedup", **where}, "text", "speedup")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A declared table; `render` turns rows into Markdown."""

    title: str  # may name the facet's value: "Step time, {precision}"
    rows: Sequence[str]
    columns: Mapping[str, Column]  # by header; with `across` it may name the value: "{context}"
    where: Mapping[str, Any] = field(default_factory=dict)
    chapter: str | None = None  # whose rows to take, if not the chapter's own: "published"
    # One table per value of `facet`, one column per value of `across`; by default, the fields named
    # in the title and in the headers.
    facet: str | None = None
    across: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names for the row fields, where the field's own name is not what a reader expects."""
    limit: int | None = None
    data: Callable[[Rows], Rows] | None = None  # prepares the rows

    def __post_init__(self) -> None:
        for name, texts in (("facet", [self.title]), ("across", self.columns)):
            parsed = (part for text in texts for part in Formatter().parse(text))
            if getattr(self, name) is None:
                named = next((field for _, field, *_ in parsed if field), None)
                object.__setattr__(self, name, named)

    def render(self, rows: Rows) -> Markup:
        """Markdown of one table, or one per facet; empty if there is nothing to show."""
        rows = self._chosen(rows)
        parts = []
        for value in values_of(rows, self.facet):
            facet = {self.facet: value} if self.facet else {}
            title = self.title.format(**{name: plain(value) for name in facet})
            parts.append(self._one(candidates(rows, **facet), title))
        return Markup("\n\n".join(filter(None, parts)))

    def _chosen(self, rows: Rows) -> Rows:
        return candidates(rows if self.data is None else self.data(rows), **self.where)

    def cells(self, sides: Sequence[Rows]) -> dict[tuple[Any, ...], list["Cell"]]:
        """The cells of several sets of rows side by side, by facet, row key and column header."""
        whole = replace(self, rows=[*([self.facet] if self.facet else []), *self.rows])
        shown = [self._chosen(rows) for rows in sides]
        keys = dict.fromkeys(key for rows in shown for key in distinct(rows, list(whole.rows)))
        columns = [whole._columns(rows) for rows in shown]
        nothing = Cell(Column({}), None)
        return {
            (*key, header): [side[header](key) if header in side else nothing for side in columns]
            for key in keys
            for header in dict.fromkeys(header for side in columns for header in side)
        }

    def _one(self, rows: Rows, title: str) -> str:
        columns = self._columns(rows)
        lines: list[list[str]] = []
        used: list[Cell] = []
        for key in distinct(rows, list(self.rows))[: self.limit]:
            cells = [cell(key) for cell in columns.values()]
            if all(cell.row is None for cell in cells):
                continue
            used += cells
            labels = [escape(plain(value)) for value in key]
            lines.append([*labels, *(cell.text() for cell in cells)])
        if not lines:
            return ""
        names = [self.headers.get(name, name.replace("_", " ")) for name in self.rows]
        header = [escape(name) for name in [*names, *columns]]
        found = [{*texts} for texts in zip(*lines, strict=True)]
        # Labels that all rows share move to the caption; empty columns are dropped.
        varies = [len(texts) > 1 for texts in found[: len(names)]]
        kept = varies if any(varies) else [True] * len(names)
        shown = [*kept, *(texts != {DASH} for texts in found[len(names) :])]
        shared = [f"{header[i]} {lines[0][i]}" for i, varied in enumerate(kept) if not varied]
        header, *lines = (list(compress(line, shown)) for line in (header, *lines))
        caption = self._caption(used, escape(title), shared)
        for mark in set(FLAG_MARKS.values()):
            if all(mark in cell.marks for cell in used if cell.can_bear(mark)):
                # A mark on every cell adds nothing to the caption.
                lines = [[text.replace(mark, "") for text in line] for line in lines]
                caption = caption.replace(f"{mark} {MARKS[mark]}", f"All: {MARKS[mark]}")
        return f"{markdown_table(header, lines, sum(kept))}\n\n*{caption}*"

    def _columns(self, rows: Rows) -> dict[str, Callable[[tuple[Any, ...]], "Cell"]]:
        """For each header, a function from row key to cell."""
        across = [self.across] if self.across else []
        indexes = {
            header: _Index(candidates(rows, **column.where), column, [*self.rows, *across], header)
            for header, column in self.columns.items()
        }
        return {
            header.format(**dict(zip(across, value, strict=True))): partial(index.cell, value)
            for value in (distinct(rows, across) if across else [()])
            for header, index in indexes.items()
        }

    def _caption(self, cells: Sequence["Cell"], title: str, shared: Sequence[str]) -> str:
        parts = [title, f"All rows: {', '.join(shared)}"] if shared else [title]
        found = [cell.row for cell in cells if cell.row is not None and cell.measured]
        clocks = dict.fromkeys(row["clock"] for row in found if row["clock"] in CLOCKS)
        counts = sorted({int(row["n"]) for row in found if not pd.isna(row["n"]) and row["n"]})
        if clocks:
            center = "mean" if all(cell.column.field == "mean" for cell in cells) else "median"
            samples = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))
            of = f", {center} of {samples}" if counts not in ([], [1]) else ""
            names = " and ".join(CLOCKS[clock] for clock in clocks)
            parts.append(names[0].upper() + names[1:] + of)
        marks = dict.fromkeys(mark for cell in cells for mark in cell.marks)
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
            one_word = len(self.reason.split()) == 1  # "overflow" says more than "failed"
            return escape(self.reason) if one_word else STATUS_CELLS[self.row["status"]]
        if pd.isna(self.row.get(self.column.field)):
            return DASH
        return escape(quoted(self.row, self.column.format, self.column.field)) + "".join(self.marks)

    @property
    def reason(self) -> str:
        """Why there is no value, where that is known."""
        reason = self.row["reason"] if self.row is not None else None
        return reason if isinstance(reason, str) else ""

    @property
    def measured(self) -> bool:
        return self.row is not None and self.row["status"] == "ok"

    def can_bear(self, mark: str) -> bool:
        """Whether a mark can apply: § to any measured cell, others only to numbers with a clock."""
        clock = None if self.row is None or self.column.format == "text" else self.row["clock"]
        return self.measured and (clock in CLOCKS or mark == FLAG_MARKS[UNCOMMITTED])

    @cached_property
    def marks(self) -> list[str]:
        if self.row is None:
            return []
        flags = self.row["flags"] if isinstance(self.row["flags"], tuple) else ()
        spread = "↕" if unsteady(self.row) else "~" if self.row["noisy"] is True else None
        found = {spread, *map(FLAG_MARKS.get, flags)}
        return [mark for mark in MARKS if mark in found and self.can_bear(mark)]


class _Index:
    """The rows that may fill one column, by row key and `across` value."""

    def __init__(self, rows: Rows, column: Column, keys: Sequence[str], header: str) -> None:
        self.column, self.keys, self.header = column, keys, header
        self.exact: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
        self.partial: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for row in records(rows):
            key = tuple(row.get(name) for name in keys)
            if row["status"] == "ok" or not any(map(pd.isna, key)):
                self.exact[key].append(row)
            else:
                self.partial.append((key, row))

    def cell(self, across: tuple[Any, ...], key: tuple[Any, ...]) -> Cell:
        """The cell of one table row: a measured value, or a row that says why there is none."""
        key = (*key, *across)
        found = self.exact.get(key, [])
        measured = [row for row in found if row["status"] == "ok"]
        if len(measured) > 1:
            where = dict(zip(self.keys, key, strict=True))
            raise ValueError(f"column {self.header!r}: {len(measured)} rows match {where}")
        reasons = (
            row
            for partial, row in self.partial
            if all(pd.isna(a) or a == b for a, b in zip(partial, key, strict=True))
        )
        return Cell(self.column, next(iter([*measured, *found]), None) or next(reasons, None))


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Reasons for empty cells that are longer than one word."""
    states = [(cell.row["status"], cell.reason) for cell in cells if cell.row]
    states = [(s, reason) for s, reason in states if s in EXPLAINED and len(reason.split()) > 1]
    reasons = (f"{STATUS_CELLS[status]}: {escape(reason)}" for status, reason in states)
    return [reason for _, reason in grouped_reasons(reasons)]
