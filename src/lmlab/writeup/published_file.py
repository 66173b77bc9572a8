"""A CSV file of published figures: typed in by hand, hence checked cell by cell.

A wrong cell ends in one line with the file, its line, the column, the value and what is allowed.
Rows keep the number of their line as index, so that they can be chosen first and checked then: what
must be a time in one row need not be stated in another.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lmlab.study.results import ResultError

Line = tuple[int, list[str]]
"""Its number in the file, and its cells."""


class PublishedError(ResultError):
    """A file of published figures that cannot be used, in one line."""


@dataclass(frozen=True)
class Kind:
    """What the cells of a column may hold."""

    allowed: str
    fits: Callable[[str], object]


def _is_positive(text: str) -> bool:
    return bool(re.fullmatch(r"\d*\.?\d+([eE][+-]?\d+)?", text, re.ASCII)) and float(text) > 0


NUMBER = Kind("a number above zero", _is_positive)
COUNT = Kind("a whole number", re.compile(r"[0-9]+").fullmatch)
COUNT_IF_STATED = Kind(
    "a whole number, or nothing where it is not stated", re.compile(r"[0-9]*").fullmatch
)
MEBIBYTES = Kind("a whole number and its unit, as in '64 MiB'", re.compile(r"[0-9]+ MiB").fullmatch)


def read_columns(file: Path, columns: Iterable[str]) -> pd.DataFrame:
    """These columns as text, indexed by line; no rows where the file is not there."""
    wanted = list(columns)
    if not file.exists():
        return pd.DataFrame(columns=wanted)
    try:
        lines = list(_cells(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PublishedError(f"{file}: not a readable CSV file ({error})") from error
    header, rows = (lines[0][1], lines[1:]) if lines else ([], [])
    _check_header(file, header, wanted)
    _check_widths(file, header, rows)
    cells, numbers = [cells for _, cells in rows], [line for line, _ in rows]
    return pd.DataFrame(cells, index=numbers, columns=header, dtype=object)[wanted]


def checked(rows: pd.DataFrame, file: Path, kinds: Mapping[str, Kind]) -> pd.DataFrame:
    """The rows of a file, if each cell of these columns is of its column's kind."""
    for column, kind in kinds.items():
        for line, text in rows[column].items():
            if not kind.fits(text):
                raise PublishedError(
                    f"{file}: line {line}: {column} = {text!r}, allowed: {kind.allowed}"
                )
    return rows


def _check_header(file: Path, header: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        if header.count(column) != 1:
            found = "is there twice" if column in header else "is not there"
            raise PublishedError(
                f"{file}: line 1: column {column!r} {found}; found: {', '.join(header)}; "
                f"allowed: {', '.join(wanted)}, each once and in any order, and others beside them"
            )


def _check_widths(file: Path, header: Sequence[str], rows: Iterable[Line]) -> None:
    for line, cells in rows:
        if len(cells) != len(header):
            raise PublishedError(
                f"{file}: line {line}: {len(cells)} cells, allowed: {len(header)}, one a column"
            )


def _cells(file: Path) -> Iterator[Line]:
    """The lines that are not empty."""
    # A spreadsheet may put a mark before the first column's name.
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
