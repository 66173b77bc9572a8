"""`lmlab measure`: measure one point from a few keys, with the study's defaults for the rest.

The template is the first of the study's points that has all the given keys, which are then set in
it. A size is a name for four hyper-parameters; if any of them is given, the size is called custom.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmlab.cli import keys
from lmlab.jobs.catalog import points_of
from lmlab.jobs.job import SIGNAL_BASE, run_job
from lmlab.jobs.launch import run_ranks, torchrun_command
from lmlab.jobs.registry import check_code, has_ranks
from lmlab.measure.identity import Machine, find_machine
from lmlab.model.shape import check_heads
from lmlab.study.config import Size, Study, load
from lmlab.study.points import Point
from lmlab.study.results import Result, read
from lmlab.study.schema import RENAMED, config_schema

CUSTOM = "custom"
COLUMNS = ["time", "n", "mean ± sd [ms]", "median [ms]", "min [ms]", "max [ms]"]


def command(arguments: argparse.Namespace) -> int:
    """Measure, print, and write to a file if asked; 1 if the measured code failed."""
    machine = find_machine()
    check_place(arguments.config)
    study = load(keys.read_config(arguments.configfile, arguments.config), machine.device)
    point = point_from_args(study, arguments.chapter, arguments.settings)
    check_code(point)
    result = measured(point, machine, study)
    try:
        print(table(point, result))
        print(result.to_json())
    finally:  # even if the reader of the pipe has exited
        if arguments.out:
            result.write(arguments.out)
    return 1 if result.status == "failed" else 0


def check_place(overrides: Sequence[str]) -> None:
    """Reject point keys after `--config`, which takes every argument that follows it."""
    allowed = config_schema()["properties"]
    for key, text in map(keys.split, overrides):
        if key not in allowed:
            raise ValueError(
                f"--config {key} = {text!r}: {key} is not a key of the configuration; "
                f"allowed: {', '.join(allowed)}; a point's own values come before --config"
            )


def measured(point: Point, machine: Machine, study: Study) -> Result:
    """Measure a point as the workflow does."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "point.json")
        if has_ranks(point):
            command = torchrun_command(point, out, study.ranks)
            with contextlib.redirect_stdout(sys.stderr):  # the table repeats the headline
                status = run_ranks(point, machine.id, out, command)
        else:
            status = run_job(point, machine.id, out)
        if status == SIGNAL_BASE + signal.SIGINT:
            raise KeyboardInterrupt
        if status:
            raise SystemExit(status)
        return read(out)


def point_from_args(study: Study, chapter: str, args: Sequence[str]) -> Point:
    """The point that `key=value` arguments ask for, with the study's defaults for the rest."""
    points = points_of(study, chapter)
    if not points:
        raise ValueError(f"{chapter} is switched off in the study {study.name!r}")
    given = read_args(args, points, study)
    template = _first_that_fits(points, given)
    parameters, settings = dict(template.parameters), dict(template.settings)
    if "size" in given:
        settings.update(asdict(study.sizes[given["size"]]))
    if "sizes" in given:
        given["sizes"] = study.shapes(given["sizes"])
    if not given.keys().isdisjoint(Size.__dataclass_fields__) and "size" in parameters:
        given["size"] = CUSTOM
    for key, value in given.items():
        holder: dict[str, Any] = parameters if key in parameters else settings
        # Some settings are a list in the configuration and a string in a point.
        joined = isinstance(holder[key], str) and isinstance(value, list)
        holder[key] = ",".join(value) if joined else value
    if "num_heads" in settings:
        check_heads(settings["d_model"], settings["num_heads"])
    return Point(chapter, parameters, settings)


def read_args(args: Sequence[str], points: Sequence[Point], study: Study) -> dict[str, Any]:
    """Keys and values, each checked against what the chapter's points have."""
    schemas = keys.schemas_for(points, study)
    given: dict[str, Any] = {}
    for key, text in map(keys.split, args):
        if key not in schemas:
            new = RENAMED.get(key)
            unknown = f"no such key; allowed: {', '.join(schemas)}"
            fault = f"{key} is now called {new}" if new in schemas else unknown
            raise ValueError(f"{key} = {text!r}: {fault}")
        if key in given:
            raise ValueError(f"{key} = {text!r}: given before; allowed: each key once")
        given[key] = keys.read_value(key, text, schemas[key])
    return given


def _first_that_fits(points: Sequence[Point], given: Mapping[str, Any]) -> Point:
    """The first point that has all given keys; a given topic must match, not just be a key."""
    topic = given.get("topic")
    chosen = [point for point in points if topic in (None, point.parameters.get("topic"))]
    for point in chosen:
        if given.keys() <= {*point.parameters, *point.settings}:
            return point
    together = ", ".join(f"{key}={value}" for key, value in given.items())
    known = dict.fromkeys(key for point in chosen for key in (*point.parameters, *point.settings))
    raise ValueError(
        f"{together}: no point of {points[0].chapter} has all of these; "
        f"allowed{' with this topic' if topic else ''}: {', '.join(known)}"
    )


def table(point: Point, result: Result) -> str:
    """The result for a person: what was measured, where, and the times of its phases."""
    lines = [point.label(), f"on {result.machine['name']}, torch {result.versions['torch']}"]
    lines += [f"{result.status}: {result.reason}"] if result.reason else result.failed_variants()
    lines += [f"flags: {', '.join(result.flags)}"] if result.flags else []
    timed = [record for record in result.measurements if "samples" in record]
    stops = {str(record.get("stopped")) for record in timed}
    if len(stops) == 1 and next(iter(stops)).startswith("time cap"):
        lines.append(f"stopped early: {stops.pop()}")
    if timed:
        lines += aligned([COLUMNS, *map(_row, timed)])
    return "\n".join(lines)


def _row(record: Mapping[str, Any]) -> list[str]:
    names = [*record["labels"].values(), *{record["quantity"]} - {"time"}]
    cells = [f"{record[key]:.4g}" for key in ("n", "mean", "value", "min", "max")]
    cells[1] += f" ± {record['sd']:.2g}" if record["sd"] is not None else ""
    return [" ".join(map(str, names)) or "time", *cells]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first left-aligned and the numbers right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
