"""`lmlab status`: every point of the study in a line, and what a rerun would have to do.

A result made by other code is not wrong, but it is not what the present code would give; nor is one
whose settings or torch have changed since. torch is compared on the machine that measured: what is
installed here says nothing about a result from elsewhere.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from lmlab.cli.configuration import read_config
from lmlab.experiments.registry import check_code
from lmlab.experiments.standing import Standing, installed_torch, standing
from lmlab.measure.identity import find_machine
from lmlab.study.chapters import all_points
from lmlab.study.config import load
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
    for each in standings:
        print(line(each))
    print(f"{study.name} on {machine}: {summary(standings)}")
    return 0


def line(each: Standing) -> str:
    """State, point, and what there is to say about it."""
    words = f"{each.state:<12}{each.point.label()}"
    remarks = "; ".join(each.remarks())
    return f"{words}: {remarks}" if remarks else words


def summary(standings: Sequence[Standing]) -> str:
    """How many points are in which state, and how many a rerun would replace."""
    states = Counter(each.state for each in standings)
    parts = [f"{count} {state}" for state, count in states.most_common()]
    outdated = {
        "made by other code": sum(each.other_code for each in standings),
        "with other settings": sum(bool(each.other_settings) for each in standings),
        "with another torch": sum(each.other_torch is not None for each in standings),
    }
    remarks = [f"{count} {what}" for what, count in outdated.items() if count]
    return "; ".join([f"{len(standings)} points, {', '.join(parts)}", *remarks])
