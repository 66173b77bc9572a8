"""Measures one point of the study in a process of its own, warm-started, and waits for it.

This client imports no torch: twenty points in a row pay for that import once. A point whose `start`
is cold gets a fresh process. If the process crashes, or the kernel kills it for its memory, the
result says so; if this client is interrupted, there is no result.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from lmlab.experiments.outcome import CRASHES
from lmlab.measure import warm_start
from lmlab.measure.identity import find_machine
from lmlab.study.points import Point, PointError, point_from_json

PROGRAM = "lmlab.experiments.run"
SIGNAL_BASE = 128  # a shell's exit status of a process that died of signal n is 128 + n


def main() -> int:
    """Run the point; the exit status is its process's."""
    arguments = _parser().parse_args()
    try:
        point = point_from_json(arguments.point)
    except PointError as error:
        print(error, file=sys.stderr)
        return 2
    cold = arguments.cold or point.parameters.get("start") == "cold"
    passed_on = ["--point", arguments.point, "--machine", arguments.machine]
    began_s = time.monotonic()
    status = warm_start.run(PROGRAM, [*passed_on, "--out", str(arguments.out)], cold=cold)
    if -status in CRASHES:
        record_crash(point, -status, began_s, arguments.out)
        return 0
    return status if status >= 0 else SIGNAL_BASE - status


def record_crash(point: Point, signal_number: int, began_s: float, out: Path) -> None:
    """Write the result that the dead process could not; only here is torch needed, for versions."""
    from lmlab.experiments.record import crashed

    result = crashed(point, find_machine(), signal_number=signal_number, began_s=began_s)
    result.write(out)
    print(result.headline())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure one point of the study.")
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--machine", required=True, help="id of the machine this must be")
    parser.add_argument("--out", required=True, type=Path, help="file that the result goes to")
    parser.add_argument("--cold", action="store_true", help="a fresh process, whatever the point")
    return parser


if __name__ == "__main__":
    sys.exit(main())
