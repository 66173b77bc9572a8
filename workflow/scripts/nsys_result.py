"""Complete the result of a point profiled under nsys with data from the nsys report."""

import argparse
import sys
from pathlib import Path

from lmlab.chapters.profile.trace_data import complete


def main() -> int:
    """Parse arguments and write the result; an unusable report is an error in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, help="what the process wrote")
    parser.add_argument("--export", type=Path, required=True, help="SQLite export of the report")
    parser.add_argument("--out", type=Path, required=True, help="file to write the result to")
    arguments = parser.parse_args()
    try:
        print(complete(arguments.measured, arguments.export, arguments.out))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
