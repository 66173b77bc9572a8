"""`lmlab check FOLDER`: whether results that came from elsewhere can be used, one line per problem.

Numbers are checked against what is possible on any machine and what the vendor states for this one.
The size of a set is its compressed size, as git stores and sends it.
"""

import argparse
import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmlab.cli.keys import read_config
from lmlab.jobs.catalog import points_of
from lmlab.measure.peaks import peaks_of
from lmlab.result_sets.sets import RATES, files_of
from lmlab.study.config import load
from lmlab.study.points import Point
from lmlab.study.results import LARGEST_FILE_BYTES, Result, ResultError, parse
from lmlab.study.selection import machine_of

MACHINE_LIMIT_BYTES = 5_000_000
KINDS = ("unreadable", "misplaced", "duplicate", "impossible", "mixed", "missing", "size")
# Versions that affect numbers; fingerprints cover the code.
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver")
NAMED = 3
# A card may boost above the clock of its datasheet.
ABOVE_STATED = 1.1
Line = tuple[str, str]


def command(arguments: argparse.Namespace) -> int:
    """Print one line per problem; 1 if there are any."""
    ignored = set(filter(None, arguments.ignore.split(",")))
    if unknown := ignored - set(KINDS):
        raise ValueError(f"--ignore {min(unknown)!r}; allowed: {', '.join(KINDS)}")
    config = read_config(arguments.configfile, arguments.config)
    files = dict(files_of(arguments.folder))
    results: dict[str, Result] = {}
    found: list[Line] = []
    for path, content in files.items():
        try:
            results[path] = parse(content, path)
        except ResultError as error:
            found.append(("unreadable", str(error)))
    found += _foreign(arguments.folder)
    found += _places(arguments.folder, results)
    found += _impossible(results)
    found += _mixed(results)
    found += _missing(results, config)
    found += _oversize(files)
    lines = [f"{kind}: {line}" for kind, line in found if kind not in ignored]
    print(*lines, f"{len(results)} results read, {len(lines)} problems", sep="\n")
    return 1 if lines else 0


def _foreign(spec: str) -> Iterator[Line]:
    """Files in a folder that are not results, and symbolic links."""
    folder = Path(spec) if Path(spec).is_dir() else Path("results", spec)
    for path in sorted(folder.rglob("*"), key=str):
        if path.is_symlink() or (path.is_file() and path.suffix != ".json"):
            yield "misplaced", f"{path.relative_to(folder)}: not a result"


def _places(spec: str, results: Mapping[str, Result]) -> Iterator[Line]:
    """Duplicate points, results at the wrong path, and folders named after another machine."""
    seen: dict[str, str] = {}
    for path, result in results.items():
        try:
            expected = Point(result.chapter, result.parameters).path(Path(), "").as_posix()
        except ValueError as error:
            expected = f"a point without a path ({error})"
        if (first := seen.setdefault(expected, path)) != path:
            yield "duplicate", f"{path}: the same point as {first}"
        elif expected != path:
            yield "misplaced", f"{path}: holds the result of {expected}"
    machines = {str(result.machine["id"]) for result in results.values()}
    name = Path(spec).resolve().name if Path(spec).is_dir() else spec.partition(":")[0]
    if len(machines) == 1 and machine_of(Path(name).name) not in machines:
        yield "misplaced", f"the folder {name!r} holds results of {min(machines)!r}: rename it"


def _impossible(results: Mapping[str, Result]) -> Iterator[Line]:
    """Values that are impossible on this device; the machine card states its memory."""
    card = results["machine.json"].measurements if "machine.json" in results else ()
    memory = next((r["value"] for r in card if r["quantity"] == "memory_bytes"), None)
    for path, result in results.items():
        yield from (("impossible", f"{path}: {fault}") for fault in _faults(result, memory))


def _faults(result: Result, memory: float | None) -> Iterator[str]:
    peaks = peaks_of(result.machine["name"]) or {"tflops": {}, "memory_tb_per_s": math.inf}
    flops: dict[str, float] = defaultdict(float)
    for record in result.measurements:
        phase = record["labels"].get("phase")
        if record["quantity"] == "flops" and phase and record["labels"].get("kind") != "other":
            flops[phase] += record["value"]
    for record in result.measurements:
        if record["status"] == "ok" and isinstance(record["value"], int | float):
            name = " ".join([record["quantity"], *map(str, record["labels"].values())])
            work = flops.get(record["labels"].get("phase", ""), 0.0)
            for fault in (*_inconsistent(record), *_beyond(record, peaks, memory, work)):
                yield f"{name} = {record['value']:.6g} {record['unit']}: {fault}"


def _inconsistent(record: Mapping[str, Any]) -> Iterator[str]:
    """Statistics that contradict their samples, and values out of range, such as negative times."""
    value, quantity = record["value"], record["quantity"]
    if record["unit"] == "ms" and value < 0:
        yield "a negative time"
    if record.get("clock") in ("wall", "events") and quantity == "time" and value == 0:
        yield "a time of zero"
    if quantity in RATES and value <= 0:
        yield "a rate that is not positive"
    if "samples" not in record:
        return
    samples = record["samples"]
    low, high = record.get("min", min(samples)), record.get("max", max(samples))
    if not low <= value <= high:
        yield f"a median outside of {low:.6g} to {high:.6g}"
    elif not math.isclose(value, statistics.median(samples), rel_tol=1e-6, abs_tol=1e-9):
        yield f"not the median of its samples, {statistics.median(samples):.6g}"


def _beyond(
    record: Mapping[str, Any], peaks: Mapping[str, Any], memory: float | None, flops: float
) -> Iterator[str]:
    """Values above the vendor's figures or the device's memory."""
    quantity, value = record["quantity"], record["value"]
    limit = {
        "matmul_rate": ABOVE_STATED * peaks["tflops"].get(record["labels"].get("dtype"), math.inf),
        "copy_bandwidth": ABOVE_STATED * peaks["memory_tb_per_s"] * 1e3,
        "peak_memory": memory,
    }.get(quantity)
    if limit is not None and value > limit:
        yield f"above the device's limit of {limit:.6g}"
    # fp32 may be computed on tensor cores, so the fastest of all stated rates is the limit.
    fastest = max(peaks["tflops"].values(), default=math.inf)
    rate = flops / value / 1e9 if quantity == "time" and value > 0 else 0.0
    if rate > ABOVE_STATED * fastest:
        yield f"{rate:.6g} TFLOP/s, above the stated peak of {fastest:.6g}"


def _mixed(results: Mapping[str, Result]) -> Iterator[Line]:
    """Machines and versions that differ within the set."""
    stated = [{**result.versions, "machines": result.machine["id"]} for result in results.values()]
    for name in ("machines", *VERSIONS):
        counts = Counter(str(each.get(name)) for each in stated)
        if len(counts) > 1:
            found = (f"{value} ({count} results)" for value, count in counts.most_common())
            yield "mixed", f"{name}: {', '.join(found)}"


def _missing(results: Mapping[str, Result], config: Mapping[str, Any]) -> Iterator[Line]:
    """Missing points of the configured study; by default that is the study for the device."""
    if not results:
        return
    study = load(config, next(iter(results.values())).machine["device"])
    for chapter in study.chapters:
        points = points_of(study, chapter)
        labels = [p.label() for p in points if p.path(Path(), "").as_posix() not in results]
        more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
        if labels:
            where = f"points of {chapter} in the study {study.name!r}"
            some = f"{'; '.join(labels[:NAMED])}{more}"
            yield "missing", f"{len(labels)} of {len(points)} {where}: {some}"


def _oversize(files: Mapping[str, bytes]) -> Iterator[Line]:
    for path, content in files.items():
        if len(content) > LARGEST_FILE_BYTES:
            yield "size", f"{path}: {len(content):,} bytes; allowed: {LARGEST_FILE_BYTES:,}"
    stored = sum(len(zlib.compress(content)) for content in files.values())
    if stored > MACHINE_LIMIT_BYTES:
        limit = f"allowed for a machine: {MACHINE_LIMIT_BYTES:,}"
        yield "size", f"{stored:,} bytes as git stores them, compressed; {limit}"
