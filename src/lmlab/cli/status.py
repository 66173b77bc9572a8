"""`lmlab status`: one line per point of the study, and what a rerun would measure.

A stale result is not wrong, but it is not what the current code would give. torch versions are
compared only for results of this machine: what is installed here does not matter for others.
"""

import argparse
from importlib.metadata import version

from lmlab.cli.keys import read_config
from lmlab.jobs.catalog import all_points
from lmlab.jobs.registry import check_code
from lmlab.jobs.staleness import estimate, state_of, summary
from lmlab.measure.identity import find_machine
from lmlab.study.config import load
from lmlab.study.selection import check_results_exist, machine_of, select


def command(arguments: argparse.Namespace) -> int:
    """Print the state of every point, then a summary."""
    config = read_config(arguments.configfile, arguments.config)
    if arguments.machine is not None:
        config = {**config, "machine": arguments.machine}
    here = find_machine()
    selection = select(config, here.id, here.device)
    study = load(config, selection.device)
    check_results_exist(selection, arguments.results, here.id)
    torch_version = version("torch") if machine_of(selection.machine) == here.id else None
    points = all_points(study)
    for point in points:
        check_code(point)
    states = [state_of(p, arguments.results, selection.machine, torch_version) for p in points]
    for each in states:
        remarks = f": {'; '.join(each.remarks)}" if each.remarks else ""
        print(f"{each.state:<12}{each.point.label()}{remarks}")
    if selection.measuring:
        print(estimate(states))
    print(f"{study.name} on {selection.machine}: {summary(states)}")
    return 0
