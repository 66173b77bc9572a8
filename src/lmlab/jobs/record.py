"""From the outcome of a point to its result: the numbers with their provenance.

A record is opened before the measurement and closed after it. The code's fingerprint is taken at
the start, because a file edited while a long point runs is not the file that it runs.

As a program this writes a result without numbers, for whoever waited for processes that have died:

    python -m lmlab.jobs.record --point JSON --out PATH --status oom --reason TEXT --began SECONDS
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from lmlab.jobs.outcome import Outcome, without_numbers
from lmlab.jobs.registry import fingerprint
from lmlab.measure.environment import commit, versions
from lmlab.measure.identity import Machine, find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point, point_from_json
from lmlab.study.results import Result


class Record:
    """What is known of a result before its numbers are, taken when the point begins."""

    def __init__(self, point: Point, machine: Machine, *, began_s: float | None = None) -> None:
        """For a point that begins now, or began at that time of the monotonic clock."""
        self.point = point
        self.machine = machine
        self.code_fingerprint = fingerprint(point)
        self.commit = commit(ROOT)
        now_s = time.monotonic()
        self.began_s = now_s if began_s is None else began_s
        self.started_at = datetime.now(UTC) - timedelta(seconds=now_s - self.began_s)

    def close(self, outcome: Outcome) -> Result:
        """The result of the point, as it is written."""
        machine = self.machine
        return Result(
            chapter=self.point.chapter,
            parameters=self.point.parameters,
            settings=self.point.settings,
            status=outcome.status,
            reason=outcome.reason,
            measurements=tuple(outcome.measurements),
            data=outcome.data,
            flags=outcome.flags,
            machine={"id": machine.id, "device": machine.device, "name": machine.name},
            versions=versions(),
            commit=self.commit,
            code_fingerprint=self.code_fingerprint,
            started_at=self.started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            elapsed_s=round(time.monotonic() - self.began_s, 3),
        )


def write(result: Result, out: Path) -> int:
    """Write a result and print its headline; one that is too large or not finite is a failure."""
    try:
        result.write(out)
    except ValueError as error:
        reason = without_numbers("failed", str(error)).reason
        result = replace(result, status="failed", reason=reason, measurements=(), data={})
        result.write(out)
    with contextlib.suppress(BrokenPipeError):  # nobody reads it
        print(result.headline(), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write a result without numbers and print its headline."""
    parser = argparse.ArgumentParser(prog="lmlab.jobs.record", description=__doc__)
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file to write the result to")
    parser.add_argument("--status", required=True, choices=["unsupported", "oom", "failed"])
    parser.add_argument("--reason", required=True, help="why there are no numbers")
    parser.add_argument("--began", type=float, help="when, by the monotonic clock")
    arguments = parser.parse_args(argv)
    record = Record(point_from_json(arguments.point), find_machine(), began_s=arguments.began)
    return write(record.close(without_numbers(arguments.status, arguments.reason)), arguments.out)


if __name__ == "__main__":
    sys.exit(main())
