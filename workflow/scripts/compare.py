"""Write the page that shows several machines side by side."""

import argparse
import json
import sys
from pathlib import Path

from lmlab.cli.machines import write_comparison


def main() -> int:
    """Parse arguments and write the files; a user's mistake is reported in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="config.yaml as JSON")
    parser.add_argument("--machines", type=lambda text: text.split(","), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the page; figures go next to it")
    arguments = vars(parser.parse_args())
    try:
        faults = write_comparison(**arguments, results=Path("results"))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for fault in faults:
        print(f"not rendered: {fault}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
