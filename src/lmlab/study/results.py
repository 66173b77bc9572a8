"""A result is one JSON file: what was asked, what came out, and what it was measured with.

Results travel: between machines, between commits, through other people's hands. Hence a schema, a
status with a reason instead of a missing file, and a fingerprint of the code, so that a reader can
tell what a number is worth without asking who made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jsonschema

from lmlab.study.files import SCHEMAS, write_atomically
from lmlab.study.points import Point

SCHEMA_VERSION = 1
Status = Literal["ok", "oom", "unsupported", "failed"]

# Pictures need reduced data, not traces; past this a page of six hundred results gets slow.
SIZE_LIMIT_BYTES = 200_000
# A race has dozens of times; a progress line has room for the phases of a step.
HEADLINE_TIMES = 6


class ResultError(ValueError):
    """A result file that cannot be used, in one line."""


class LacksKey(ResultError):
    """A result without a key that its reader knows."""

    def __init__(self, source: Path, key: str) -> None:
        super().__init__(
            f"{source}: has no {key!r}, which is read now; made by other code or changed by hand, "
            "it must be measured anew"
        )
        self.source = source


class Told(dict[str, Any]):
    """What a file holds under its keys; asked for another one, it says which file lacks it.

    The schema leaves open what a chapter keeps for its page, and code that is older or newer than
    the page has kept something else.
    """

    source: Path | None = None

    def __missing__(self, key: str) -> Any:
        raise KeyError(key) if self.source is None else LacksKey(self.source, key)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured point; `workflow/schemas/result.schema.json` says what each field may hold."""

    chapter: str
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]
    status: Status
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    commit: Mapping[str, Any]
    code_fingerprint: str
    started_at: str
    elapsed_s: float
    reason: str | None = None
    measurements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    def write(self, path: Path) -> None:
        """Check against the schema, then write whole or not at all."""
        text = self.to_json()
        _validate(json.loads(text), path)
        if len(text) > SIZE_LIMIT_BYTES:
            raise ResultError(
                f"{path}: {len(text):,} bytes; a result holds at most {SIZE_LIMIT_BYTES:,}: "
                "reduce what it keeps for pictures"
            )
        write_atomically(path, json.dumps(json.loads(text), indent=1) + "\n")

    def headline(self) -> str:
        """What this point gave, short enough for a progress line."""
        if self.status != "ok":
            return f"{self.status}: {self.reason}"
        times = [
            f"{name} {measurement['median_ms']:.4g} ms"
            for name, measurement in self.measurements.items()
        ]
        more = [f"{len(times) - HEADLINE_TIMES} more"] if len(times) > HEADLINE_TIMES else []
        return ", ".join([*times[:HEADLINE_TIMES], *more]) or "ok"


def read(path: Path) -> Result:
    """Read a result, or say in one line why it is none."""

    def told_by_file(values: dict[str, Any]) -> Told:
        told = Told(values)
        told.source = path
        return told

    try:
        values = json.loads(path.read_text(), object_hook=told_by_file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultError(f"{path}: not a readable JSON file ({error})") from error
    _validate(values, path)
    return Result(**{**values, "flags": tuple(values["flags"])})


def read_of(point: Point, path: Path, machine: str) -> Result:
    """The result of that point on that machine: a file may have been copied here by hand."""
    result = read(path)
    if (result.chapter, dict(result.parameters)) != (point.chapter, dict(point.parameters)):
        raise ResultError(f"{path}: holds the result of another point")
    if result.machine["id"] != machine:
        raise ResultError(f"{path}: measured on {result.machine['id']}, not on {machine}")
    return result


@cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / "result.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


def _validate(values: object, path: Path) -> None:
    error = jsonschema.exceptions.best_match(_validator().iter_errors(values))
    if error is not None:
        where = ".".join(str(part) for part in error.absolute_path) or "the whole file"
        raise ResultError(f"{path}: {where}: {error.message[:200]}")
