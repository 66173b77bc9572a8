"""A chapter's points and what is there of them.

A page is made from the points that the study asks for, not from the files that happen to lie in a
folder: a point without a file is then visible as "not measured", and a file that no point asks for
is left out. A file that cannot be read, that belongs to another point or machine, or that holds
something else than the page reads, counts as unreadable and says why. Nothing here stops the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lmlab.study.chapters import READS, points_of
from lmlab.study.config import Study
from lmlab.study.points import SEPARATOR, Point
from lmlab.study.results import Result, ResultError, read_of

RowStatus = Literal["ok", "oom", "unsupported", "failed", "missing", "unreadable"]


@dataclass(frozen=True)
class Row:
    """One point of the study and its result, if there is one."""

    point: Point
    path: str
    """Where the result lies, from the folder that holds `results`."""
    result: Result | None = None
    problem: str | None = None
    """Why a file that exists could not be used."""

    @property
    def status(self) -> RowStatus:
        if self.result is not None:
            return self.result.status
        return "missing" if self.problem is None else "unreadable"

    @property
    def reason(self) -> str | None:
        return self.problem if self.result is None else self.result.reason

    def kept(self, key: str, otherwise: Any) -> Any:
        """What the result's data holds under a key: one that is ok must have it, others may."""
        if self.result is None:
            return otherwise
        data = self.result.data
        return data[key] if self.status == "ok" else data.get(key, otherwise)

    @property
    def other_settings(self) -> list[str]:
        """Settings under which the result was measured and that the study no longer asks for."""
        if self.result is None:
            return []
        asked, used = self.point.settings, self.result.settings
        return sorted(key for key in asked if used.get(key) != asked[key])


@dataclass(frozen=True)
class Collected:
    """Everything one chapter's page is made from."""

    chapter: str
    machine: str
    device: str
    study: Study
    rows: Sequence[Row]
    card: Result | None = None
    """The machine card: ceilings and peaks that times are held against."""
    references: Path = field(default=Path())
    beside: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Points of the other chapters that this one's page reads."""

    @cached_property
    def results(self) -> list[Result]:
        """What was measured, in the study's order."""
        return [row.result for row in self.rows if row.result is not None]

    @property
    def device_name(self) -> str:
        """The device as its results name it; a CPU is always called one."""
        names = {str(result.machine["name"]) for result in self.results} or {self.machine}
        name = " and ".join(sorted(names))
        return f"{name} (CPU)" if self.device == "cpu" else name

    def ceiling(self, *keys: str) -> Any:
        """A value of the machine card's data, or None."""
        value: Any = self.card.data if self.card is not None else None
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def collect(
    study: Study,
    chapter: str,
    *,
    machine: str,
    device: str,
    results: Path,
    references: Path,
    refused: Mapping[Path, ResultError] = MappingProxyType({}),
) -> Collected:
    """Read a chapter's results; what is missing or refused stays in the list without one."""

    def rows_of(name: str) -> list[Row]:
        return [_row(point, results, machine, refused) for point in points_of(study, name)]

    card = next((row.result for row in rows_of("machine") if row.status == "ok"), None)
    beside = {other: rows_of(other) for other in READS.get(chapter, ())}
    return Collected(chapter, machine, device, study, rows_of(chapter), card, references, beside)


def pattern_of(paths: Iterable[str]) -> str:
    """One glob for many results: a parameter that differs becomes a star."""
    split = [path.split("/") for path in paths]
    if len({len(parts) for parts in split}) > 1:
        return "/".join(_common_start(split)) + "/**"
    return "/".join(_merge(values) for values in zip(*split, strict=True))


def sources_of(rows: Iterable[Row]) -> list[str]:
    """`results/.../*.json (20 files)`; says so when some are not there."""
    chosen = list(rows)
    if not chosen:
        return []
    there = sum(row.status != "missing" for row in chosen)
    files = f"{there} file{'' if there == 1 else 's'}"
    if there < len(chosen):
        files = f"{there} of {len(chosen)} files"
    return [f"{pattern_of(row.path for row in chosen)} ({files})"]


def _row(point: Point, results: Path, machine: str, refused: Mapping[Path, ResultError]) -> Row:
    path = point.path(results, machine)
    shown = path.relative_to(results.parent).as_posix()
    if not path.exists():
        return Row(point, shown)
    try:
        if path in refused:
            raise refused[path]
        return Row(point, shown, read_of(point, path, machine))
    except ResultError as error:
        return Row(point, shown, problem=str(error).replace(f"{path}: ", ""))


def _merge(values: tuple[str, ...]) -> str:
    if len(set(values)) == 1:
        return values[0]
    keys = {value.partition(SEPARATOR)[0] for value in values}
    suffix = ".json" if all(value.endswith(".json") for value in values) else ""
    return f"{keys.pop()}{SEPARATOR}*{suffix}" if len(keys) == 1 else f"*{suffix}"


def _common_start(split: list[list[str]]) -> list[str]:
    start: list[str] = []
    for values in zip(*split, strict=False):
        if len(set(values)) > 1:
            break
        start.append(values[0])
    return start
