"""A measurement job: one point in a process of its own, warm-started, and waited for. No torch.

Twenty points in a row pay for importing torch once. A point whose `start` is cold gets a fresh
process. If the process crashes, or the kernel kills it for its memory, the result says so; if the
job itself is interrupted, there is no result.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmlab.jobs.outcome import CRASHES
from lmlab.jobs.registry import RUNNER
from lmlab.measure import warm_start
from lmlab.measure.identity import find_machine
from lmlab.study.points import Point

SIGNAL_BASE = 128  # a shell's exit status of a process that died of signal n is 128 + n


def run_job(point: Point, machine: str, out: Path, *, cold: bool) -> int:
    """Run the point in its own process, and record a crash that it could not record itself."""
    words = ["--point", point.to_json(), "--machine", machine, "--out", str(out)]
    cold = cold or point.parameters.get("start") == "cold"
    began_s, written_before = time.monotonic(), _written_at(out)
    with watching_for_signals() as interrupted:
        status = warm_start.run(RUNNER, words, cold=cold)
        crash = -status in CRASHES and not interrupted()
    # A process may also crash on its way out, its result written and sound.
    if crash and _written_at(out) == written_before:
        record_crash(point, -status, began_s, out)
        return 0
    return status if status >= 0 else SIGNAL_BASE - status


def record_crash(point: Point, signal_number: int, began_s: float, out: Path) -> None:
    """Write the result that the dead process could not; only here is torch needed, for versions."""
    from lmlab.jobs.record import crashed

    result = crashed(point, find_machine(), signal_number=signal_number, began_s=began_s)
    result.write(out)
    print(result.headline())


@contextmanager
def watching_for_signals() -> Iterator[Callable[[], bool]]:
    """Whether a signal reached this process, whoever handles it: the job that gets it passed on
    may crash instead of ending, and that says nothing about the point."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def arrived() -> bool:
        try:
            return bool(reader.recv(1))
        except BlockingIOError:
            return False

    with reader, writer:
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield arrived
        finally:
            signal.set_wakeup_fd(before)


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
