"""Make one chapter's tables, figures and findings from its results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lmlab.study.chapters import GRIDS
from lmlab.study.config import ConfigError
from lmlab.study.points import PointError
from lmlab.study.results import ResultError
from lmlab.writeup.build import build


def main() -> int:
    """Arguments in, one call, files out; what a user can get wrong is one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="config.yaml as JSON")
    parser.add_argument("--chapter", choices=list(GRIDS), required=True)
    parser.add_argument("--machine", required=True, help="folder of results/ to read")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--figures", type=Path, required=True, help="folder to draw into")
    parser.add_argument("--out", type=Path, required=True, help="the chapter's JSON document")
    arguments = vars(parser.parse_args())
    try:
        build(arguments.pop("config"), arguments.pop("chapter"), **arguments)
    except (ConfigError, PointError, ResultError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
