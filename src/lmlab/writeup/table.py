"""A table of the page: plain cells, a caption, and the result files it was made from.

Cells are text already rounded for a reader, still unescaped: the same table can be printed as
Markdown, put into JSON for the page, or compared in a test. Where a number is missing its cell says
why (`OOM`, `not measured`), because an empty cell leaves the reader to guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmlab.writeup.markdown import Markdown, code, escape
from lmlab.writeup.markdown import table as markdown_table

STATUS_CELLS = {
    "oom": "OOM",
    "unsupported": "unsupported",
    "failed": "failed",
    "missing": "not measured",
    "unreadable": "unreadable",
}
NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A heading and how its cells are set."""

    title: str
    align: Literal["left", "right"] = "right"
    code: bool = False
    """Names of kernels and files are set as code."""


@dataclass(frozen=True)
class Table:
    """Rows for a reader, with where they come from."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str
    sources: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {
            "title": self.title,
            "columns": [vars(column) for column in self.columns],
            "rows": [list(row) for row in self.rows],
            "caption": self.caption,
            "sources": list(self.sources),
        }


def table_from_json(values: Mapping[str, Any]) -> Table:
    """Read what `Table.to_json` wrote."""
    return Table(**{**values, "columns": [Column(**column) for column in values["columns"]]})


def to_markdown(table: Table) -> Markdown:
    """Title, rows, caption and sources, in that order."""
    rows = [
        [_cell(column, cell) for column, cell in zip(table.columns, row, strict=True)]
        for row in table.rows
    ]
    header = [escape(column.title) for column in table.columns]
    body = markdown_table(header, [column.align for column in table.columns], rows)
    return Markdown(f"**{escape(table.title)}**\n\n{body}\n\n{_notes(table)}")


def _cell(column: Column, text: str) -> Markdown:
    return code(text, in_table=True) if column.code and text else escape(text)


def _notes(table: Table) -> str:
    sources = "; ".join(_source(source) for source in table.sources)
    return f"<sub>{escape(table.caption)} From {sources or 'no result file'}.</sub>"


def _source(source: str) -> str:
    """A pattern of files, set as code, with the count that follows it."""
    pattern, _, count = source.partition(" (")
    return f"{code(pattern)} ({escape(count)}" if count else code(pattern)
