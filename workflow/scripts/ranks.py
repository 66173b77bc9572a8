"""Measure one point with several ranks: `ranks.py --point ... -- torchrun ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lmlab.jobs.launch import run_ranks
from lmlab.study.points import point_from_json


def main() -> int:
    """Arguments in, one call; a user's mistake is one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--machine", required=True, help="id of the machine this must be")
    parser.add_argument("--out", required=True, type=Path, help="file to write the result to")
    parser.add_argument("command", nargs="+", help="the torchrun command to run, after --")
    arguments = parser.parse_args()
    try:
        point = point_from_json(arguments.point)
        return run_ranks(point, arguments.machine, arguments.out, arguments.command)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
