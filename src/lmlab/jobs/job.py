"""A measurement job: one point in a separate, warm-started process. No torch.

Twenty points in a row pay for importing torch once. A point whose `start` is cold gets a fresh
process. If the process crashes, or the kernel kills it for its memory, the result records that; if
the job itself is interrupted, there is no result.
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

SIGNAL_BASE = 128  # a shell's exit status for a process that died of signal n is 128 + n


def run_job(point: Point, machine: str, out: Path, *, cold: bool) -> int:
    """Run the point in its own process, and record a crash that it could not record itself."""
    arguments = ["--point", point.to_json(), "--machine", machine, "--out", str(out)]
    cold = cold or point.parameters.get("start") == "cold"
    began_s, written_before = time.monotonic(), written_at(out)
    with watching_for_signals() as received:
        status = warm_start.run(RUNNER, arguments, cold=cold)
        crashed = -status in CRASHES and received() is None
    # A process may also crash while it exits, after it has written a valid result.
    if crashed and written_at(out) == written_before:
        from lmlab.jobs.record import crashed as result_of_crash  # torch, for its version

        result = result_of_crash(point, find_machine(), signal_number=-status, began_s=began_s)
        result.write(out)
        print(result.headline())
        return 0
    return status if status >= 0 else SIGNAL_BASE - status


@contextmanager
def watching_for_signals() -> Iterator[Callable[[], int | None]]:
    """The first signal that reached this process, whoever handles it; None so far.

    An interrupted job may crash instead of exiting; such a crash says nothing about the point.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def received() -> int | None:
        try:
            return reader.recv(1, socket.MSG_PEEK)[0]
        except BlockingIOError:
            return None

    with reader, writer:
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield received
        finally:
            signal.set_wakeup_fd(before)


def written_at(path: Path) -> int | None:
    """When a file was last written; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None
