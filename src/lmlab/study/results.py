"""One JSON file per measured point: written atomically, validated on write and on read.

`workflow/schemas/result.schema.json` defines what a result holds. What a schema cannot express is
checked here: numbers are finite and not absurd, a quantity with a unit is a number, no record
occurs twice, `n` matches the samples, and settings have the same types as in the study. An unusable
file raises a one-line error that names it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import fastjsonschema

from lmlab.study.files import SCHEMAS, write_atomically
from lmlab.study.points import Point
from lmlab.study.schema import short
from lmlab.study.selection import machine_of

SCHEMA_VERSION = 2
Status = Literal["ok", "oom", "unsupported", "failed"]

# Figures need reduced data, not traces: a page reads hundreds of results.
SIZE_LIMIT_BYTES = 200_000
# A file has one line per record, so it is larger than the same result on a single line.
LARGEST_FILE_BYTES = 4 * SIZE_LIMIT_BYTES
# Far above any measured or computed value; beyond it, arithmetic in the report overflows.
LARGEST_NUMBER = 1e36
# A progress line fits the phases of a step, not dozens of variants.
HEADLINE_TIMES = 6


class ResultError(ValueError):
    """A result file that cannot be used; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured point."""

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
    spent_s: Mapping[str, float] | None = None
    reason: str | None = None
    measurements: tuple[Mapping[str, Any], ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        values = {k: v for k, v in asdict(self).items() if v is not None or k != "spent_s"}
        return json.dumps(values, separators=(",", ":"), allow_nan=False)

    def write(self, path: Path) -> None:
        """Validate as on reading, then write atomically."""
        text = self.to_json()
        parse(text, path)
        if len(text) > SIZE_LIMIT_BYTES:
            raise ResultError(
                f"{path}: {len(text):,} bytes; a result holds at most {SIZE_LIMIT_BYTES:,}: "
                "reduce what it stores in data"
            )
        write_atomically(path, _one_record_per_line(json.loads(text)))

    def headline(self) -> str:
        """The result, short enough for a progress line."""
        if self.status != "ok":
            return f"{self.status}: {self.reason}"
        times = [
            f"{_label(record)} {record['value']:.4g} ms"
            for record in self.measurements
            if record["quantity"] == "time" and record["status"] == "ok"
        ]
        more = [f"{len(times) - HEADLINE_TIMES} more"] if len(times) > HEADLINE_TIMES else []
        return ", ".join([*times[:HEADLINE_TIMES], *more]) or "ok"

    def failed_variants(self) -> list[str]:
        """One line per variant that failed inside this point."""
        return [
            f"{_label(record)}: {record['reason']}"
            for record in self.measurements
            if record["status"] == "failed"
        ]


def read(path: Path) -> Result:
    """Read a result, or raise a `ResultError` that says what is wrong with the file."""
    try:
        if (size := path.stat().st_size) > LARGEST_FILE_BYTES:
            raise ValueError(f"{size:,} bytes, at most {LARGEST_FILE_BYTES:,} are read")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not a readable JSON file ({error})") from error
    return parse(content, path)


def parse(content: str | bytes, path: Path | str) -> Result:
    """A result from the content of its file; `path` is named in errors."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        values = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise ResultError(f"{path}: not a readable JSON file ({line})") from error
    if isinstance(values, dict) and values.get("schema_version") == 1:
        raise ResultError(
            f"{path}: written by lmlab 0.1 (schema 1), which is no longer read; measure it again"
        )
    _validate(values, path)
    _check_records(values["measurements"], path)
    measurements, flags = tuple(values.pop("measurements")), tuple(values.pop("flags"))
    return Result(**values, measurements=measurements, flags=flags)


def checked(result: Result, point: Point, path: Path, machine: str) -> Result:
    """Return the result if it belongs to this point and machine, else raise a `ResultError`: the
    file may have been copied here by hand."""
    if (result.chapter, dict(result.parameters)) != (point.chapter, dict(point.parameters)):
        raise ResultError(f"{path}: holds the result of another point")
    if result.machine["id"] != machine_of(machine):
        raise ResultError(f"{path}: measured on {result.machine['id']}, not on {machine}")
    for key, setting in point.settings.items():
        if key in result.settings and not _like(result.settings[key], setting):
            found = json.dumps(result.settings[key])[:60]
            raise ResultError(f"{path}: settings.{key} = {found}; the study has {setting!r}")
    return result


def _like(found: object, wanted: object) -> bool:
    """Whether two settings have the same type; integers and floats count as one type."""
    if isinstance(found, dict) and isinstance(wanted, Mapping):
        return all(_like(found[key], wanted[key]) for key in found if key in wanted)
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return not wanted or all(_like(each, wanted[0]) for each in found)
    return _kind(found) == _kind(wanted)


def _kind(value: object) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _check_records(records: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """Check that quantities with a unit are numbers, `n` counts samples, and records are unique."""
    seen = set()
    for record in records:
        if record.get("n") != (len(record["samples"]) if "samples" in record else None):
            raise ResultError(f"{path}: {_label(record)}: n is not the number of samples")
        if record["unit"] and isinstance(record["value"], str | bool):
            raise ResultError(
                f"{path}: {record['quantity']} = {short(record['value'])}, unit = "
                f"{short(record['unit'])}; a quantity with a unit is a number"
            )
        labels = frozenset(record["labels"].items())
        if (key := (record["quantity"], record.get("clock"), labels)) in seen:
            raise ResultError(f"{path}: {_label(record)}: {record['quantity']} occurs twice")
        seen.add(key)


def _one_record_per_line(values: Mapping[str, Any]) -> str:
    """JSON with reviewable diffs: one line per key and per measurement."""
    lines = {key: json.dumps(value) for key, value in values.items()}
    records = ",\n  ".join(map(json.dumps, values["measurements"]))
    lines["measurements"] = f"[\n  {records}\n ]" if records else "[]"
    body = ",\n ".join(f"{json.dumps(key)}: {text}" for key, text in lines.items())
    return f"{{\n {body}\n}}\n"


def _label(record: Mapping[str, Any]) -> str:
    words = " ".join(str(value) for value in record["labels"].values()).split()
    return " ".join(words) or str(record["quantity"])


def _number(text: str) -> float:
    """A finite number of sane size: NaN, Infinity and 1e999 are rejected."""
    number = float(text)
    if not abs(number) <= LARGEST_NUMBER:
        raise ValueError(f"{text[:20]} is not a number up to {LARGEST_NUMBER:g}")
    return number


def _integer(text: str) -> int:
    _number(text)
    return int(text)


@cache
def _validator() -> Callable[[object], object]:
    """The schema compiled to Python, thirty times as fast as interpreting it."""
    return fastjsonschema.compile(json.loads((SCHEMAS / "result.schema.json").read_text()))


def _validate(values: object, path: Path | str) -> None:
    try:
        _validator()(values)
    except fastjsonschema.JsonSchemaValueException as error:
        fault = error.message.removeprefix("data").removeprefix(".")
        raise ResultError(f"{path}: {fault[:200]}") from None
