"""A result without numbers, written for a point that nobody could measure.

    python -m lmlab.jobs.unmeasured --point JSON --out PATH --status oom --reason WORDS

The launcher of rank jobs knows no torch, and a result names torch's version; so it has this done
in a process that has torch at hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lmlab.jobs.outcome import without_numbers
from lmlab.jobs.record import open_record
from lmlab.measure.identity import find_machine
from lmlab.study.points import point_from_json


def main(argv: Sequence[str] | None = None) -> int:
    """Write the result and print its headline."""
    parser = argparse.ArgumentParser(prog="lmlab.jobs.unmeasured", description=__doc__)
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that the result goes to")
    parser.add_argument("--status", required=True, choices=["unsupported", "oom", "failed"])
    parser.add_argument("--reason", required=True, help="why there are no numbers")
    arguments = parser.parse_args(argv)
    record = open_record(point_from_json(arguments.point), find_machine())
    result = record.close(without_numbers(arguments.status, arguments.reason))
    result.write(arguments.out)
    print(result.headline())
    return 0


if __name__ == "__main__":
    sys.exit(main())
