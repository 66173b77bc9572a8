"""Turn the outcome of a point into its result: the numbers with their provenance.

A record is opened before the measurement and closed after it. The code's fingerprint is taken at
the start, because a file may be edited while a long point runs.

Run as a program, this writes a result without numbers on behalf of processes that died:

    python -m lmlab.jobs.record '{"point": P, "out": PATH, "status": S, "reason": R, "began_s": T}'
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from lmlab.jobs.outcome import Outcome, without_numbers
from lmlab.jobs.registry import fingerprint
from lmlab.measure.environment import commit, versions
from lmlab.measure.identity import Machine, find_machine
from lmlab.measure.time_spent import spent_s
from lmlab.study.files import ROOT, NotWritten
from lmlab.study.points import Point, point_from_json
from lmlab.study.results import Result


class Record:
    """The parts of a result that are known before its numbers, captured when the point begins.

    Not to be confused with the records of `measure.records`, each of which is one number.
    """

    def __init__(self, point: Point, machine: Machine, *, began_s: float | None = None) -> None:
        """Open a record; `began_s` is the point's start on the monotonic clock (default: now)."""
        self.point, self.machine = point, machine
        self.code_fingerprint = fingerprint(point)
        self.commit = commit(ROOT)
        now_s = time.monotonic()
        self.began_s = now_s if began_s is None else began_s
        self.started_at = datetime.now(UTC) - timedelta(seconds=now_s - self.began_s)

    def close(self, outcome: Outcome, flags: Iterable[str] = ()) -> Result:
        """Build the point's result; `flags` are those of its device."""
        flags = [*outcome.flags, *flags, *(["noisy"] if outcome.noisy else [])]
        return Result(
            **vars(self.point),
            status=outcome.status,
            reason=outcome.reason,
            measurements=tuple(outcome.measurements),
            data=outcome.data,
            flags=tuple(dict.fromkeys(flags)),
            machine={key: getattr(self.machine, key) for key in ("id", "device", "name")},
            versions=versions(),
            commit=self.commit,
            code_fingerprint=self.code_fingerprint,
            started_at=self.started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            elapsed_s=round(time.monotonic() - self.began_s, 3),
            spent_s=spent_s(),
        )


def write(result: Result, out: Path) -> int:
    """Write a result and print its headline; if it is invalid or too large, write a failure."""
    try:
        result.write(out)
    except NotWritten:  # a full disk does not make the result invalid
        raise
    except ValueError as error:
        reason = without_numbers("failed", str(error)).reason
        result = replace(result, status="failed", reason=reason, measurements=(), data={})
        result.write(out)
    with contextlib.suppress(BrokenPipeError):  # nobody reads it
        print(result.headline(), flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Write a result without numbers and print its headline."""
    given = json.loads(argv[0])
    record = Record(point_from_json(given["point"]), find_machine(), began_s=given["began_s"])
    result = record.close(without_numbers(given["status"], given["reason"]))
    return write(result, Path(given["out"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
