"""The client: runs a job in a child of the helper, or in a fresh process, and tells no difference.

Either way the job is a session of its own, gets this process's SIGINT, SIGTERM and SIGHUP, ends
when this process ends, leaves no process of its own behind, and its exit is returned the way
subprocess does it: 0 to 255, or minus the number of the signal that killed it. A job that is lost
because somebody killed the helper gives EX_TEMPFAIL, 75: it says nothing about the job.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Self

from lmlab.measure.warm_start.meeting_place import WarmStartUnavailable
from lmlab.measure.warm_start.messages import Inbox, Job, send
from lmlab.measure.warm_start.processes import kill_family, signal_group
from lmlab.measure.warm_start.starting import PATIENCE_S, WarmStartSettingError, find_or_start

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ATTEMPTS = 3


def run(module: str, arguments: Sequence[str], *, cold: bool = False) -> int:
    """Call `main(arguments)` of a module in a process of its own and return its exit code.

    `cold` asks for a fresh process, for points that measure the start itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if not cold and _is_wanted():
        try:
            return _run_warm(module, list(arguments))
        except WarmStartUnavailable as trouble:
            _say(f"{trouble}; a fresh process is used instead")
    return _run_plain(module, list(arguments))


def _is_wanted() -> bool:
    setting = os.environ.get("LMLAB_WARM_START", "1")
    if setting not in ("0", "1"):
        raise WarmStartSettingError(f"LMLAB_WARM_START is {setting!r}: 0 and 1 are allowed")
    return setting == "1" and sys.platform == "linux"


def _say(line: str) -> None:
    print(f"warm start: {line}", file=sys.stderr, flush=True)


class SignalRelay:
    """While it is entered, signals that would end this process go to the job instead.

    The job then decides how it ends, and its exit is reported as always. Signals that come before
    there is a job are kept for it; signals that this process ignores are left ignored.
    """

    def __init__(self) -> None:
        self._job: int | None = None
        self._kept: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Only the main thread may set handlers; elsewhere the signals are the main thread's affair.
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._relay)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]

    def aim(self, job: int) -> None:
        """Name the job, and hand it what came early."""
        self._job = job
        while self._kept:
            signal_group(job, self._kept.pop(0))

    def _relay(self, number: int, _frame: FrameType | None) -> None:
        if self._job is None:
            self._kept.append(number)
        else:
            signal_group(self._job, number)


def _run_warm(module: str, arguments: list[str]) -> int:
    """Hand the job to a helper; to another one if that ends by itself just then."""
    for _ in range(_ATTEMPTS):
        with _errors_before_the_job():
            job = Job.of_this_process(module, arguments)
            connection = find_or_start()
        with connection, SignalRelay() as relay:
            inbox = Inbox(connection)
            with _errors_before_the_job():
                pid = _hand_over(connection, inbox, job)
            if pid is not None:
                relay.aim(pid)
                return _await_exit(connection, inbox, pid)
    raise WarmStartUnavailable(f"{_ATTEMPTS} helpers ended before they took the job")


@contextlib.contextmanager
def _errors_before_the_job() -> Iterator[None]:
    """What goes wrong here leaves the job undone, so that it may be done the plain way."""
    try:
        yield
    except OSError as error:
        raise WarmStartUnavailable(f"the helper cannot be used: {error}") from error


def _hand_over(connection: socket.socket, inbox: Inbox, job: Job) -> int | None:
    """Send the job; its pid, or None when the helper was gone before it could take it."""
    connection.settimeout(PATIENCE_S)
    with contextlib.ExitStack() as stack:
        streams = [_stream(descriptor, stack) for descriptor in range(3)]
        try:
            send(connection, {"job": dataclasses.asdict(job)}, streams)
        except ConnectionError:
            return None
    try:
        answer = inbox.wait()
    except TimeoutError:
        raise WarmStartUnavailable(f"the helper was silent for {PATIENCE_S:.0f} s") from None
    if answer is not None and "trouble" in answer:
        raise WarmStartUnavailable(answer["trouble"])
    return None if answer is None else int(answer["pid"])


def _stream(descriptor: int, stack: contextlib.ExitStack) -> int:
    """The descriptor itself, or the null device where this process was started without it."""
    try:
        os.fstat(descriptor)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, descriptor)
    return descriptor


def _await_exit(connection: socket.socket, inbox: Inbox, pid: int) -> int:
    connection.settimeout(None)
    answer = inbox.wait()
    if answer is not None:
        return int(answer["exit"])
    # The kernel killed the job together with the helper; what the job had started is left to us.
    kill_family(pid)
    _say("the helper was killed and the job with it; the next job starts another helper")
    # Not a signal's number: the job did not die of its own doing, and is worth another try.
    return os.EX_TEMPFAIL


def _run_plain(module: str, arguments: list[str]) -> int:
    program = [sys.executable, "-m", "lmlab.measure.warm_start.job", str(os.getpid()), module]
    with SignalRelay() as relay:
        process = subprocess.Popen([*program, *arguments], start_new_session=True)
        relay.aim(process.pid)
        status = process.wait()
    kill_family(process.pid)
    return status
