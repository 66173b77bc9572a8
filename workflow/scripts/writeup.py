"""Render the page from the chapters' documents and the templates."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lmlab.writeup.page import PageError, write_page


def main() -> int:
    """Arguments in, one call, one file out; what a user can get wrong is one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chapters", type=Path, nargs="+", required=True, help="in page order")
    parser.add_argument("--templates", type=Path, nargs="+", required=True, help="of one folder")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        write_page(arguments.chapters, templates=arguments.templates[0].parent, out=arguments.out)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
