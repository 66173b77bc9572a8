"""Write the report of one machine: all pages into a folder, or the interactive page as one file."""

import argparse
import gc
import json
import sys
from pathlib import Path

from lmlab.cli.report import write_report


def main() -> int:
    """Parse arguments and write the files; a user's mistake is reported in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="config.yaml as JSON")
    parser.add_argument("--machine", required=True, help="folder of results/ to read")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the pages, or an HTML file"
    )
    arguments = vars(parser.parse_args())
    # Thousands of results are millions of objects, hardly any of them garbage.
    gc.disable()
    try:
        faults = write_report(**arguments, results=Path("results"))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for fault in faults:
        print(fault, file=sys.stderr)
    return 0 if arguments["out"].exists() else 1


if __name__ == "__main__":
    sys.exit(main())
