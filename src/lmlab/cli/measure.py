"""`lmlab measure`: one point by hand, from a few keys and the study's defaults for the rest.

The study already says what a point of a chapter needs, so the first of its points that has the keys
given is taken, and the keys are set in it. A size is a name for four hyper-parameters; give any of
them and the size is called custom.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lmlab.cli.configuration import read_config, split
from lmlab.cli.keys import (
    KINDS,
    KINDS_OF_RANKS,
    KeyValueError,
    Kind,
    Value,
    choice,
    read_value,
    several,
)
from lmlab.cli.ranks import run_ranks
from lmlab.jobs.catalog import points_of
from lmlab.jobs.launch import ranks_here, torchrun_words
from lmlab.jobs.registry import check_code, has_ranks
from lmlab.measure.identity import Machine, find_machine
from lmlab.model.shape import check_heads
from lmlab.study.config import Study, keys_of_config, load
from lmlab.study.points import Point
from lmlab.study.results import Result, read

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
SIZES = ("size", "sizes")
CUSTOM = "custom"


def command(arguments: argparse.Namespace) -> int:
    """Measure, print, and write where asked to; 1 when the measured code failed."""
    machine = find_machine()
    check_place(arguments.config)
    study = load(read_config(arguments.configfile, arguments.config), machine.device)
    point = point_from_words(study, arguments.chapter, arguments.settings)
    check_code(point)
    result = (
        measure_with_ranks(point, machine, study) if has_ranks(point) else alone(point, machine)
    )
    try:
        print(table(point, result))
        print(result.to_json())
    finally:  # whether or not anybody reads on
        if arguments.out:
            write(result, arguments.out)
    return 1 if result.status == "failed" else 0


def check_place(words: Sequence[str]) -> None:
    """`--config` takes every word that follows it: none of them may be meant for the point."""
    for key, text in map(split, words):
        if key not in keys_of_config():
            raise KeyValueError(
                f"--config {key} = {text!r}: {key} is not a key of the configuration; "
                f"allowed: {', '.join(keys_of_config())}; a point's own values come before --config"
            )


def write(result: Result, out: Path) -> None:
    """Write the result to the file asked for."""
    try:
        result.write(out)
    except OSError as error:
        raise KeyValueError(f"--out {out}: {error.strerror}") from error


def alone(point: Point, machine: Machine) -> Result:
    """The result of a point that this process measures itself."""
    from lmlab.jobs.run import measure_point  # torch, seconds: not before all is checked

    return measure_point(point, machine)


def measure_with_ranks(point: Point, machine: Machine, study: Study) -> Result:
    """The result of a point that takes several processes."""
    ranks_here(point)  # a world that its nodes cannot share evenly shows here
    ranks = {**study.ranks, "nnodes": point.settings["nnodes"]}
    torchrun = torchrun_words(int(point.parameters["world_size"]), ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "point.json")
        if status := run_ranks(point, machine.id, out, torchrun):
            raise SystemExit(status)
        return read(out)


def point_from_words(study: Study, chapter: str, words: Sequence[str]) -> Point:
    """The point that `key=value` words ask for, with the study's defaults for the rest."""
    points = points_of(study, chapter)
    if not points:
        raise KeyValueError(f"{chapter} is switched off in the study {study.name!r}")
    given = read_words(words, points, study)
    template = _first_that_fits(points, given)
    parameters: dict[str, Any] = dict(template.parameters)
    settings = dict(template.settings)
    if "size" in given:
        settings.update(study.size_settings(str(given["size"])))
    if "sizes" in given:
        settings["sizes"] = study.shapes(cast(list[str], given.pop("sizes")))
    if any(key in given for key in SHAPE):
        given = {**given, "size": CUSTOM}
    parameters.update(
        {
            key: value
            for key, value in given.items()
            if key in parameters and not isinstance(value, list)
        }
    )
    settings.update({key: value for key, value in given.items() if key in settings})
    if "num_heads" in settings:
        check_heads(settings["d_model"], settings["num_heads"])
    return Point(chapter, parameters, settings)


def read_words(words: Sequence[str], points: Sequence[Point], study: Study) -> dict[str, Value]:
    """Keys and values, each checked against what the chapter's points know."""
    known, kinds = keys_of(points), kinds_of(points, study)
    given: dict[str, Value] = {}
    for key, text in map(split, words):
        if key not in known:
            raise KeyValueError(f"{key} = {text!r}: no such key; allowed: {', '.join(known)}")
        if key in given:
            raise KeyValueError(f"{key} = {text!r}: given before; allowed: each key once")
        given[key] = read_value(key, text, kinds[key])
    return given


def keys_of(points: Sequence[Point]) -> list[str]:
    """What can be set for some of the points, in their order."""
    keys = (key for point in points for key in [*point.parameters, *point.settings])
    return [key for key in dict.fromkeys(keys) if key in {*KINDS, *SIZES}]


def kinds_of(points: Sequence[Point], study: Study) -> dict[str, Kind]:
    """What each key may hold for the points of a chapter: its own topics, the study's sizes."""
    size = choice(*study.sizes)
    topics = dict.fromkeys(str(point.parameters.get("topic")) for point in points)
    own = {"size": size, "sizes": several(size), "topic": choice(*topics)}
    return {**KINDS, **own, **(KINDS_OF_RANKS if has_ranks(points[0]) else {})}


def _first_that_fits(points: Sequence[Point], given: Mapping[str, Value]) -> Point:
    """The first point with every key given; a topic is another experiment, so it must agree."""
    for point in points:
        topic = point.parameters.get("topic")
        has_keys = all(key in point.parameters or key in point.settings for key in given)
        if has_keys and given.get("topic", topic) == topic:
            return point
    together = ", ".join(f"{key}={value}" for key, value in given.items())
    chosen = [point for point in points if point.parameters.get("topic") == given.get("topic")]
    allowed = f"; allowed with this topic: {', '.join(keys_of(chosen))}" if chosen else ""
    raise KeyValueError(f"{together}: no point of {points[0].chapter} has all of these{allowed}")


def table(point: Point, result: Result) -> str:
    """The result for a person: what was measured, where, and the times of its phases."""
    lines = [point.label(), f"on {result.machine['name']}, torch {result.versions['torch']}"]
    lines += (
        result.failed_variants() if result.status == "ok" else [f"{result.status}: {result.reason}"]
    )
    if result.flags:
        lines.append(f"flags: {', '.join(result.flags)}")
    lines += _stopped_early(result)
    if result.measurements:
        head = ("phase", "n", "mean ± sd [ms]", "median [ms]", "min [ms]", "max [ms]")
        rows = [_row(record) for record in result.measurements if "samples" in record]
        lines += _aligned([head, *rows])
    return "\n".join(lines)


def _stopped_early(result: Result) -> list[str]:
    """A cap that ended every phase, once."""
    stops = {str(record["stopped"]) for record in result.measurements if "stopped" in record}
    lines = [f"stopped early: {stop}" for stop in stops if stop.startswith("time cap")]
    return lines if len(stops) == 1 else []


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    name = " ".join(map(str, record["labels"].values())) or record["quantity"]
    mean, sd = record["mean"], record["sd"]
    spread = f"{mean:.4g} ± {sd:.2g}" if sd is not None else f"{mean:.4g}"
    rest = [f"{record[key]:.4g}" for key in ("value", "min", "max")]
    return (name, str(record["n"]), spread, *rest)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left and the numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
