"""Measure one point with several ranks: `ranks.py --point ... -- torchrun ...`."""

import argparse
import sys
from pathlib import Path

from lmlab.jobs.job import run_as_program
from lmlab.jobs.launch import run_ranks
from lmlab.study.points import point_from_json


def main() -> int:
    """Parse arguments and measure; a user's mistake is reported in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--machine", required=True, help="id of the machine this must be")
    parser.add_argument("--out", required=True, type=Path, help="file to write the result to")
    parser.add_argument("command", nargs="+", help="the torchrun command to run, after --")
    given = parser.parse_args()
    return run_as_program(
        lambda: run_ranks(point_from_json(given.point), given.machine, given.out, given.command)
    )


if __name__ == "__main__":
    sys.exit(main())
