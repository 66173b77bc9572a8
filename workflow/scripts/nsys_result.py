"""Complete the result of a point that nsys recorded with what its report holds."""

import argparse
import sys
from pathlib import Path

from lmlab.chapters.profile.trace_data import complete


def main() -> int:
    """Arguments in, one call, one file out; a report that cannot be used is one line."""
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
