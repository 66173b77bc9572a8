"""`lmlab status`: every point of the study in a line, and what a rerun would have to do.

A result made by other code is not wrong, but it is not what the present code would give; nor is one
whose settings or torch have changed since. torch is compared on the machine that measured: what is
installed here says nothing about a result from elsewhere.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lmlab.cli.configuration import read_config
from lmlab.jobs.catalog import all_points
from lmlab.jobs.registry import check_code
from lmlab.jobs.staleness import Standing, installed_torch, standing
from lmlab.measure.identity import find_machine
from lmlab.study.config import load
from lmlab.study.results import read
from lmlab.study.selection import check_results_are_there, select


def command(arguments: argparse.Namespace) -> int:
    """Print how every point stands; a summary last."""
    config = read_config(arguments.configfile, arguments.config)
    here = find_machine()
    if arguments.machine is not None:
        config = {**config, "machine": arguments.machine}
    selection = select(config, here.id, here.device)
    machine = selection.machine
    study = load(config, selection.device)
    check_results_are_there(selection, arguments.results, here.id)
    torch_version = installed_torch() if machine == here.id else None
    points = all_points(study)
    for point in points:
        check_code(point)
    standings = [standing(point, arguments.results, machine, torch_version) for point in points]
    broken = [broken_arms(each, arguments.results, machine) for each in standings]
    for each, arms in zip(standings, broken, strict=True):
        print(line(each, arms))
    print(f"{study.name} on {machine}: {summary(standings, sum(map(bool, broken)))}")
    return 0


def broken_arms(each: Standing, results: Path, machine: str) -> list[str]:
    """What became of variants that failed in a point that is ok by the others."""
    if each.state != "ok":
        return []
    return read(each.point.path(results, machine)).failed_variants()


def line(each: Standing, arms: Sequence[str] = ()) -> str:
    """State, point, and what there is to say about it and its arms."""
    words = f"{each.state:<12}{each.point.label()}"
    remarks = "; ".join([*arms, *each.remarks()])
    return f"{words}: {remarks}" if remarks else words


def summary(standings: Sequence[Standing], with_failed_arms: int = 0) -> str:
    """How many points are in which state, have broken arms, or would be replaced by a rerun."""
    states = Counter(each.state for each in standings)
    parts = [f"{count} {state}" for state, count in states.most_common()]
    to_know = {
        "with arms that failed": with_failed_arms,
        "made by other code": sum(each.other_code for each in standings),
        "with other settings": sum(bool(each.other_settings) for each in standings),
        "with another torch": sum(each.other_torch is not None for each in standings),
    }
    remarks = [f"{count} {what}" for what, count in to_know.items() if count]
    return "; ".join([f"{len(standings)} points, {', '.join(parts)}", *remarks])
