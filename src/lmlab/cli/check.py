"""`lmlab check FOLDER`: whether results that came from elsewhere can be used, one line per problem.

A file may be unreadable, in the wrong place or there twice; a number may be impossible on any
machine or above what the vendor states for this one; results of several versions of PyTorch may be
mixed; points of the study may be missing; and a set may be too large for the repository. The size
counts compressed, as git stores and sends it: the readable JSON of a full study is several times as
large.
"""

from __future__ import annotations

import argparse
import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lmlab.cli.configuration import read_config
from lmlab.comparison.sets import files_of, summarized
from lmlab.jobs.catalog import all_points
from lmlab.measure.peaks import peaks_of
from lmlab.study.config import load
from lmlab.study.points import Point, PointError
from lmlab.study.results import LARGEST_FILE_BYTES, Result, ResultError, parse

MACHINE_LIMIT_BYTES = 5_000_000
KINDS = ("unreadable", "misplaced", "duplicate", "impossible", "mixed", "missing", "size")
# Versions that move numbers; code is told apart by fingerprints.
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver")
NAMED = 3
# Starting processes takes as long as reading so many results.
MANY_FILES = 2000
# A card may boost above the clock of its datasheet.
ABOVE_STATED = 1.1
Line = tuple[str, str]


@dataclass(frozen=True)
class Limits:
    """What the machine cannot exceed; None where nothing is stated."""

    rates: Mapping[str, float]
    bandwidth: float | None
    memory: float | None


def command(arguments: argparse.Namespace) -> int:
    """Print one line per problem; 1 if there are any."""
    ignored = set(filter(None, arguments.ignore.split(",")))
    if unknown := ignored - set(KINDS):
        raise ValueError(f"--ignore {min(unknown)!r}; allowed: {', '.join(KINDS)}")
    config = read_config(arguments.configfile, arguments.config)
    found, count = problems(arguments.folder, config)
    lines = [f"{kind}: {line}" for kind, line in found if kind not in ignored]
    print(*lines, f"{count} results read, {len(lines)} problems", sep="\n")
    return 1 if lines else 0


def problems(spec: str, config: Mapping[str, Any]) -> tuple[list[Line], int]:
    """All problems of a set by kind, and how many results could be read."""
    examined = _examined(list(files_of(spec)))
    results = {each.path: each.result for each in examined if each.result is not None}
    found: list[Line] = [
        ("unreadable", line)
        for line in summarized([each.unreadable for each in examined if each.unreadable])
    ]
    found += [("misplaced", f"{name}: not a result") for name in _foreign(spec)]
    found += _places(spec, results)
    found += [("impossible", f"{e.path}: {line}") for e in examined for line in e.impossible]
    found += [("mixed", line) for line in _mixed(list(results.values()))]
    found += [("missing", line) for line in _missing(results, config)]
    found += [("size", line) for line in _oversize(examined)]
    return found, len(results)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What one file gives: a result without its numbers, or why it cannot be read."""

    path: str
    size: int
    compressed: int
    result: Result | None = None
    unreadable: str = ""
    impossible: tuple[str, ...] = ()


def _examined(files: Sequence[tuple[str, bytes]]) -> list[Examined]:
    """Every file by itself, in several processes where that pays."""
    memory = _memory(dict(files).get("machine.json", b""))
    examine = partial(_examine, memory=memory)
    if len(files) < MANY_FILES:
        return list(map(examine, files))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(examine, files, chunksize=100))


def _examine(file: tuple[str, bytes], memory: float | None) -> Examined:
    path, content = file
    sizes: dict[str, Any] = {
        "path": path,
        "size": len(content),
        "compressed": len(zlib.compress(content)),
    }
    try:
        result = parse(content, path)
    except ResultError as error:
        return Examined(**sizes, unreadable=str(error))
    peaks = peaks_of(result.machine["name"])
    limits = Limits(
        rates=peaks["tflops"] if peaks else {},
        bandwidth=peaks["memory_tb_per_s"] * 1e3 if peaks else None,
        memory=memory,
    )
    lines = tuple(impossible(result, limits))
    head = replace(result, measurements=(), data={}, settings={})
    return Examined(**sizes, result=head, impossible=lines)


def _memory(card: bytes) -> float | None:
    """The memory of the device, from the machine card."""
    try:
        records = parse(card, "machine.json").measurements
    except ResultError:
        return None
    return next((r["value"] for r in records if r["quantity"] == "memory_bytes"), None)


def _foreign(spec: str) -> Iterator[str]:
    """Files of a folder that are no results, and links out of it."""
    folder = next((f for f in (Path(spec), Path("results", spec)) if f.is_dir()), None)
    for path in sorted(folder.rglob("*")) if folder else ():
        if path.is_symlink() or (path.is_file() and path.suffix != ".json"):
            yield str(path.relative_to(folder)) if folder else ""


def _places(spec: str, results: Mapping[str, Result]) -> Iterator[Line]:
    """Every point once, at its own path, in the folder of its machine."""
    seen: dict[tuple[Any, ...], str] = {}
    for path, result in results.items():
        key = (result.chapter, *sorted(map(str, result.parameters.items())))
        if key in seen:
            yield "duplicate", f"{path}: the same point as {seen[key]}"
        elif (expected := _expected(result)) != path:
            yield "misplaced", f"{path}: holds the result of {expected}"
        seen.setdefault(key, path)
    machines = Counter(result.machine["id"] for result in results.values())
    if len(machines) > 1:
        yield "mixed", f"machines: {_counts(machines)}"
    name = Path(spec).resolve().name if Path(spec).is_dir() else spec.partition(":")[0]
    machine = Path(name).name.partition("@")[0]
    if len(machines) == 1 and machine not in machines:
        yield "misplaced", f"the folder {name!r} holds results of {min(machines)!r}: rename it"


def _expected(result: Result) -> str:
    try:
        return str(Point(result.chapter, result.parameters).path(Path(), "").as_posix())
    except PointError as error:
        return f"a point without a path ({error})"


def impossible(result: Result, limits: Limits) -> Iterator[str]:
    """What cannot be true of a measurement."""
    flops: dict[str, float] = defaultdict(float)
    for record in result.measurements:
        phase = record["labels"].get("phase")
        if record["quantity"] == "flops" and phase and record["labels"].get("kind") != "other":
            flops[phase] += record["value"]
    for record in result.measurements:
        if record["status"] == "ok" and isinstance(record["value"], int | float):
            name = " ".join([record["quantity"], *map(str, record["labels"].values())])
            for fault in (*_inconsistent(record), *_beyond(record, limits, flops)):
                yield f"{name} = {record['value']:.6g} {record['unit']}: {fault}"


def _inconsistent(record: Mapping[str, Any]) -> Iterator[str]:
    """Statistics that contradict the samples, and times that no clock shows."""
    value = record["value"]
    if record["unit"] == "ms" and value < 0:
        yield "a negative time"
    if record.get("clock") in ("wall", "events") and record["quantity"] == "time" and value == 0:
        yield "nothing takes no time"
    if "samples" not in record:
        return
    samples = record["samples"]
    low, high = record.get("min", min(samples)), record.get("max", max(samples))
    if not low <= value <= high:
        yield f"a median outside of {low:.6g} to {high:.6g}"
    elif not math.isclose(value, statistics.median(samples), rel_tol=1e-6, abs_tol=1e-9):
        yield f"not the median of its samples, {statistics.median(samples):.6g}"
    if record.get("n", len(samples)) != len(samples):
        yield f"n = {record['n']}, but {len(samples)} samples"


def _beyond(record: Mapping[str, Any], limits: Limits, flops: Mapping[str, float]) -> Iterator[str]:
    """What is above the vendor's figures, or does not fit into the device."""
    quantity, labels, value = record["quantity"], record["labels"], record["value"]
    stated = {
        "matmul_rate": limits.rates.get(labels.get("dtype", "")),
        "copy_bandwidth": limits.bandwidth,
        "peak_memory": limits.memory,
    }.get(quantity)
    slack = 1 if quantity == "peak_memory" else ABOVE_STATED
    if stated is not None and value > slack * stated:
        yield f"above the device's {stated:.6g}"
    if quantity in ("matmul_rate", "copy_bandwidth") and value <= 0:
        yield "a rate that is not positive"
    # fp32 may be computed on tensor cores, so the fastest of all stated rates is the limit.
    fastest = max(limits.rates.values(), default=math.inf)
    rate = flops.get(labels.get("phase", ""), 0) / value / 1e9 if value > 0 else 0.0
    if quantity == "time" and rate > ABOVE_STATED * fastest:
        yield f"{rate:.6g} TFLOP/s, above the stated peak of {fastest:.6g}"


def _mixed(results: Sequence[Result]) -> Iterator[str]:
    for name in VERSIONS:
        found = Counter(str(result.versions.get(name)) for result in results)
        if len(found) > 1:
            yield f"{name}: {_counts(found)}"


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{value} ({count} results)" for value, count in found.most_common())


def _missing(results: Mapping[str, Result], config: Mapping[str, Any]) -> Iterator[str]:
    """Points of the study that fits the device, or that the configuration names."""
    device = next((str(result.machine["device"]) for result in results.values()), None)
    if device is None:
        return
    study = load(config, device)
    lacking: dict[str, list[str]] = defaultdict(list)
    points = all_points(study)
    for point in points:
        if point.path(Path(), "").as_posix() not in results:
            lacking[point.chapter].append(point.label())
    for chapter, labels in lacking.items():
        total = sum(point.chapter == chapter for point in points)
        more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
        yield (
            f"{len(labels)} of {total} points of {chapter} in the study {study.name!r}: "
            f"{'; '.join(labels[:NAMED])}{more}"
        )


def _oversize(files: Sequence[Examined]) -> Iterator[str]:
    for each in files:
        if each.size > LARGEST_FILE_BYTES:
            yield f"{each.path}: {each.size:,} bytes; a file has at most {LARGEST_FILE_BYTES:,}"
    total = sum(each.compressed for each in files)
    if total > MACHINE_LIMIT_BYTES:
        yield f"{total:,} bytes compressed; a machine takes at most {MACHINE_LIMIT_BYTES:,}"
