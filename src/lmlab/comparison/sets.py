"""Sets of results: a folder, a machine by name, or either at a git revision (`nvidia-h200:HEAD~3`).

A set is whatever result files a folder holds, of any study. At a revision, files are read out of
`git archive` in memory: nothing is checked out, nothing of that revision runs. Only what two sets
can be compared by is kept of each record, so thousands of results stay small.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.report.frame import Rows
from lmlab.study.files import ROOT
from lmlab.study.results import SCHEMA_VERSION, Result, ResultError, parse

# What is compared: milliseconds, and the rates of the machine card, where more is better.
TIME, RATES = "time", ("matmul_rate", "copy_bandwidth")
# The shape at which a rate was highest; another machine may prefer another one.
FOUND_BY_MEASURING = {"side": RATES, "bytes": ("copy_bandwidth",)}
# Settings that say how long to measure, not what.
SAMPLING = {"steps", "samples", "rounds", "time_cap_s", "variant_cap_s", "skip_if_too_large"}
# Facts of the machine card that may explain a difference.
EXPLAINING = (
    *("clocks_mhz_sm_max", "clocks_mhz_memory_max", "power_limit_w", "gpu_count", "cpu_model"),
    "cpu_usable_cores",
)
COLUMNS = (
    *("chapter", "point", "quantity", "clock", "value", "q1", "q3", "n", "status", "reason"),
    *("file", "labels"),
)


class SetError(ValueError):
    """A set that cannot be found, in one line."""


@dataclass(frozen=True, kw_only=True)
class ResultSet:
    """The results of one set, reduced to what is compared."""

    name: str
    rows: Rows
    """One row per time or rate, and one per point without a value."""
    files: Mapping[str, Mapping[str, Any]]
    """Per file: settings and identity of the measurement."""
    facts: Mapping[str, str]
    """Machine, versions, clocks, power limit: what may explain a difference."""
    problems: tuple[str, ...] = ()


def files_of(spec: str, results: Path = Path("results")) -> Iterator[tuple[str, bytes]]:
    """The JSON files of a set, by path within it."""
    files = _files_of(spec, results)
    first = next(files, None)
    if first is None:
        raise SetError(f"{spec}: no result files (*.json)")
    yield first
    yield from files


def _files_of(spec: str, results: Path) -> Iterator[tuple[str, bytes]]:
    for folder in (Path(spec), results / spec):
        if folder.is_dir():
            for path in sorted(filter(Path.is_file, folder.rglob("*.json"))):
                yield str(path.relative_to(folder)), path.read_bytes()
            return
    name, colon, revision = spec.rpartition(":")
    if not colon or not name:
        known = sorted(path.name for path in results.glob("*/"))
        raise SetError(
            f"{spec!r} is neither a folder nor a machine in {results}; allowed: a folder, NAME or "
            f"NAME:REVISION; machines here: {', '.join(known) or 'none'}"
        )
    yield from _at_revision(name, revision, results)


def _at_revision(name: str, revision: str, results: Path) -> list[tuple[str, bytes]]:
    for folder in (results / name, Path(name), ROOT / "results" / name):
        where = folder.absolute()
        existing = next(parent for parent in (where, *where.parents) if parent.is_dir())
        top = git(existing, "rev-parse", "--show-toplevel")
        if top is None:
            continue
        root = Path(top.decode().rstrip("\n"))
        tree = git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        if tree is None:
            raise SetError(f"{name}:{revision}: {revision!r} is not a revision of {root.name}")
        inside = existing.resolve().relative_to(root) / where.relative_to(existing)
        archive = git(root, "archive", tree.decode().strip(), "--", str(inside))
        if archive is not None:
            return sorted(_members(archive, str(inside)))
    raise SetError(f"{name}:{revision}: no folder or machine {name!r} at that revision")


def _members(archive: bytes, inside: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".json"):
                content = tar.extractfile(member)
                assert content is not None, "a regular file"
                yield member.name.removeprefix(f"{inside}/"), content.read()


def git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command; None if it fails or there is no git."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def load_set(spec: str, results: Path = Path("results")) -> ResultSet:
    """Read a set; what cannot be read is a problem in one line."""
    rows: list[tuple[Any, ...]] = []
    files: dict[str, dict[str, Any]] = {}
    facts: list[Result] = []
    problems: list[str] = []
    for path, content in files_of(spec, results):
        try:
            result = _result(content, path)
            rows += _rows(result, path)
        except ResultError as error:
            problems.append(str(error))
            continue
        files[path] = {
            "settings": {k: v for k, v in result.settings.items() if _scalar(v)},
            "identity": (result.started_at, result.code_fingerprint, result.elapsed_s),
        }
        facts.append(result)
    return ResultSet(
        name=spec,
        rows=pd.DataFrame(rows, columns=list(COLUMNS)),
        files=files,
        facts=_facts(facts),
        problems=tuple(summarized(problems)),
    )


def _result(content: bytes, path: str) -> Result:
    """A result without the schema's full validation, which takes longer than all the rest; only a
    file that looks wrong is validated, for its message."""
    try:
        values = json.loads(content)
        if values["schema_version"] == SCHEMA_VERSION and isinstance(values["measurements"], list):
            return Result(**values)
    except (ValueError, KeyError, TypeError):
        pass
    return parse(content, path)


def _rows(result: Result, path: str) -> Iterator[tuple[Any, ...]]:
    name = " ".join(f"{key}={value}" for key, value in result.parameters.items())
    if result.status != "ok":
        nothing = (TIME, None, None, None, None, None)
        why = (result.status, result.reason, path, result.parameters)
        yield (result.chapter, name, *nothing, *why)
        return
    for record in result.measurements:
        try:
            quantity, labels = record["quantity"], record["labels"]
            if quantity != TIME and quantity not in RATES:
                continue
            kept = [
                f"{key}={value}"
                for key, value in labels.items()
                if quantity not in FOUND_BY_MEASURING.get(key, ())
            ]
            yield (
                *(result.chapter, " ".join([name, *kept]).strip(), quantity, record.get("clock")),
                *(record["value"], record.get("q1"), record.get("q3"), record.get("n", 1)),
                *(record["status"], record["reason"], path, {**result.parameters, **labels}),
            )
        except (KeyError, TypeError) as error:
            raise ResultError(f"{path}: a measurement is not a record ({error})") from error


def _scalar(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def _facts(results: Sequence[Result]) -> dict[str, str]:
    """What is distinct over all results of a set, as text."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        flags = [flag for flag in result.flags if flag != "noisy"]
        values = {
            "machine": result.machine["name"],
            **result.versions,
            **{f"{flag} results": "some" for flag in flags},
        }
        if result.chapter == "machine":
            values |= {
                record["quantity"]: record["value"]
                for record in result.measurements
                if record["quantity"] in EXPLAINING
            }
        for key, value in values.items():
            if value is not None:
                found.setdefault(key, Counter())[str(value)] += 1
    return {
        key: str(counts.total()) if key.endswith(" results") else ", ".join(counts)
        for key, counts in found.items()
    }


def summarized(problems: Sequence[str]) -> list[str]:
    """One line per problem; results of lmlab 0.1 share one."""
    old = [line for line in problems if "(schema 1)" in line]
    lines = [line for line in problems if line not in set(old)]
    if len(old) == 1:
        return [*lines, *old]
    count = f"{len(old)} files were written by lmlab 0.1 (schema 1), which is no longer read"
    return [*lines, *([f"{count}; measure them again"] if old else [])]
