"""Run a point in its own process and record how that process ends. No torch.

The process is forked from a warm helper that has imported torch but not used it, so a point's first
step is also the first of its process. If the process crashes, hangs or is killed by the kernel for
its memory use, the result records that; if the job itself is interrupted, there is no result.
`launch` does the same for several processes.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lmlab.jobs.budget import limit_s
from lmlab.jobs.outcome import CRASHES, NOTHING_WRITTEN, death_reason
from lmlab.jobs.registry import RUNNER
from lmlab.measure import warm_start
from lmlab.measure.warm_start.processes import relayed
from lmlab.study.points import Point

RECORDER = "lmlab.jobs.record"
SIGNAL_BASE = 128  # a shell's exit status for a process that died of signal n is 128 + n


class Job:
    """A point being measured, as seen by the process that waits for the measuring processes."""

    def __init__(self, point: Point, out: Path) -> None:
        self.point, self.out = point, out
        self._began_s, self._before = time.monotonic(), self._written_at()
        relayed.clear()  # signals that interrupted an earlier job

    def is_written(self) -> bool:
        """Whether this job wrote a result, whatever its process did afterwards."""
        return self._written_at() not in (None, self._before)

    def record(self, status: str, reason: str) -> int:
        """Write a result without numbers; in a warm process, since it names torch's version."""
        given = {"point": self.point.to_json(), "out": str(self.out), "began_s": self._began_s}
        given |= {"status": status, "reason": reason}
        return shell_status(warm_start.run(RECORDER, [json.dumps(given)]))

    def _written_at(self) -> int | None:
        return self.out.stat().st_mtime_ns if self.out.exists() else None


def run_job(point: Point, machine: str, out: Path) -> int:
    """Run the point in its own process; if that dies without a result, record the reason."""
    job, arguments = Job(point, out), ["--point", point.to_json(), "--machine", machine]
    status = warm_start.run(RUNNER, [*arguments, "--out", str(out)])
    if job.is_written():
        return 0
    if relayed:  # a crash after an interrupt is not the point's fault
        return SIGNAL_BASE + relayed[0]
    if -status == signal.SIGALRM:
        return job.record("failed", f"no result after {limit_s():g} s, so it was killed")
    if -status in CRASHES:
        return job.record("failed", death_reason(-status))
    return shell_status(status)


def shell_status(status: int) -> int:
    """A process's exit status as a shell reports it: 128 + n if signal n killed it."""
    return status if status >= 0 else SIGNAL_BASE - status


def run_as_program(run: Callable[[], int]) -> int:
    """Run a script and return its exit status; user errors and a full disk are one line each."""
    try:
        status = run()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return NOTHING_WRITTEN
    except KeyboardInterrupt:
        status = SIGNAL_BASE + signal.SIGINT
    if status == SIGNAL_BASE + signal.SIGINT:
        print("interrupted, nothing is written", file=sys.stderr)
    return status
