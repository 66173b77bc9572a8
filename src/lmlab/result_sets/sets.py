"""Sets of results: a folder, a machine by name, or either at a git revision (`nvidia-h200:HEAD~3`).

A set is whatever result files a folder holds, of any study. At a revision, files are read out of
`git archive` in memory: nothing is checked out, and no code of that revision runs. Only times,
rates and memory are kept, without their samples, so thousands of results stay small.
"""

import io
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmlab.report.frame import Rows, rows_of, table_of
from lmlab.study.files import ROOT
from lmlab.study.results import Result, ResultError, parse

Files = Mapping[str, Mapping[str, Any]]  # per file: settings and identity of the measurement
RESULTS = Path("results")
# Compared: times in ms, rates of the machine card (higher is better), and memory in bytes.
TIME, RATES = "time", ("matmul_rate", "copy_bandwidth")
MEMORY = ("peak_memory", "phase_peak", "memory", "saved_memory", "saved_for_backward")
# Labels that hold the shape with the highest rate, which may differ between machines.
AUTOTUNED_LABELS = {"side": RATES, "bytes": ("copy_bandwidth",)}
# Facts of the machine card that may explain a difference.
MACHINE_FACTS = ["clocks_mhz_sm_max", "clocks_mhz_memory_max", "power_limit_w", "gpu_count"]
MACHINE_FACTS += ["cpu_model", "cpu_usable_cores"]


@dataclass(frozen=True, kw_only=True)
class ResultSet:
    """The results of one set, reduced to what is compared."""

    name: str
    rows: Rows  # as in report/frame.py, plus `file` and `point`; only times, rates and memory
    files: Files
    facts: Mapping[str, str]
    """Machine, versions, clocks, power limit: what may explain a difference."""
    problems: Sequence[str] = ()


def files_of(spec: str) -> Iterator[tuple[str, bytes]]:
    """The JSON files of a set, by path within it."""
    folder = next((path for path in (Path(spec), RESULTS / spec) if path.is_dir()), None)
    if folder is None:
        found = _at_revision(spec)
    else:
        paths = sorted(filter(Path.is_file, folder.rglob("*.json")), key=str)
        found = ((str(path.relative_to(folder)), path.read_bytes()) for path in paths)
    first = next(found, None)
    if first is None:
        raise ValueError(f"{spec}: no result files (*.json)")
    yield first
    yield from found


def _at_revision(spec: str) -> Iterator[tuple[str, bytes]]:
    name, _, revision = spec.rpartition(":")
    if not name:
        known = sorted(path.name for path in RESULTS.glob("*/"))
        raise ValueError(
            f"{spec!r} is neither a folder nor a machine in {RESULTS}; allowed: a folder, NAME or "
            f"NAME:REVISION; machines here: {', '.join(known) or 'none'}"
        )
    for folder in (RESULTS / name, Path(name), ROOT / "results" / name):
        where = folder.absolute()
        existing = next(parent for parent in (where, *where.parents) if parent.is_dir())
        if (root := repository_of(existing)) is None:
            continue
        inside = existing.resolve().relative_to(root) / where.relative_to(existing)
        with suppress(ValueError):
            archive = git(root, "archive", commit_of(root, revision), "--", str(inside))
            if archive is not None:
                return iter(sorted(_members(archive, f"{inside}/")))
    raise ValueError(f"{spec}: no revision {revision!r} with a folder or machine {name!r}")


def _members(archive: bytes, inside: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            is_json = member.isfile() and member.name.endswith(".json")  # extractfile follows links
            if is_json and (content := tar.extractfile(member)):
                yield member.name.removeprefix(inside), content.read()


def repository_of(folder: Path) -> Path | None:
    """The working tree that a folder belongs to, or None."""
    top = git(folder, "rev-parse", "--show-toplevel")
    return None if top is None else Path(top.decode().rstrip("\n"))


def commit_of(root: Path, revision: str) -> str:
    """The commit that a revision names in a repository."""
    found = git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if found is None:
        raise ValueError(f"{revision!r} is not a revision of {root}")
    return found.decode().strip()


def git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command; None if it fails or git is not installed."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def load_set(spec: str) -> ResultSet:
    """Read a set; each unreadable file becomes a one-line problem."""
    rows: list[dict[str, Any]] = []
    files: dict[str, dict[str, Any]] = {}
    places: dict[tuple[str, str], str] = {}
    facts: dict[str, Counter[str]] = defaultdict(Counter)
    problems: list[str] = []
    for path, content in files_of(spec):
        try:
            result = parse(content, path)
            rows += _rows(result, path)
        except ResultError as error:
            problems.append(str(error))
            continue
        point = (result.chapter, str(sorted(result.parameters.items())))
        if (same := places.setdefault(point, path)) != path:
            why = "are results of the same point; a folder must hold one result per point"
            raise ValueError(f"{spec}: {same} and {path} {why}")
        scalars = {k: v for k, v in result.settings.items() if isinstance(v, str | int | float)}
        # Ranks choose the model's size at run time.
        chosen = [r for r in result.measurements if r["quantity"] == "size" and r["status"] == "ok"]
        scalars |= {f"size for {r['labels']['purpose']}": r["value"] for r in chosen}
        identity = (result.started_at, result.code_fingerprint, result.elapsed_s)
        files[path] = {"settings": scalars, "identity": identity}
        for key, value in _facts(result):
            facts[key][str(value)] += 1
    table = table_of(rows)
    table = table.reindex(columns=list(dict.fromkeys([*table, "file", "point"])))
    stated = {
        key: str(counts.total()) if key.endswith(" results") else ", ".join(counts)
        for key, counts in facts.items()
    }
    return ResultSet(name=spec, rows=table, files=files, facts=stated, problems=problems)


def _rows(result: Result, path: str) -> list[dict[str, Any]]:
    """One row per compared record, and one per point without a value."""
    compared = tuple(r for r in result.measurements if r["quantity"] in (TIME, *RATES, *MEMORY))
    rows = rows_of(replace(result, measurements=compared), Path(path))
    for row, labels in zip(rows, [r["labels"] for r in compared] or [{}], strict=False):
        tuned = {k for k in labels if row["quantity"] in AUTOTUNED_LABELS.get(k, ())}
        named = {k: v for k, v in {**result.parameters, **labels}.items() if k not in tuned}
        row["point"] = " ".join(f"{key}={value}" for key, value in named.items())
    # The setting named `samples` instead of the record's samples, so rows can be selected by it.
    return [{**row, "file": path, "samples": result.settings.get("samples")} for row in rows]


def _facts(result: Result) -> Iterator[tuple[str, Any]]:
    """Facts about a result's machine, software and flags."""
    found = {"machine": result.machine["name"], **result.versions}
    found |= {f"{flag} results": "some" for flag in result.flags if flag != "noisy"}
    if result.chapter == "machine":
        card = {record["quantity"]: record["value"] for record in result.measurements}
        found |= {name: card[name] for name in MACHINE_FACTS if name in card}
    return ((key, value) for key, value in found.items() if value is not None)
