"""Measure one point of the study and write its result."""

import argparse
import sys
from pathlib import Path

from lmlab.jobs.job import run_as_program, run_job
from lmlab.study.points import point_from_json


def main() -> int:
    """Parse arguments and measure; the exit status is that of the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--machine", required=True, help="id of the machine this must be")
    parser.add_argument("--out", required=True, type=Path, help="file to write the result to")
    given = parser.parse_args()
    return run_as_program(lambda: run_job(point_from_json(given.point), given.machine, given.out))


if __name__ == "__main__":
    sys.exit(main())
