"""The client: runs a job in a fork of the helper or in a fresh interpreter, with equal results.

Either way the job runs in a new session, receives this process's SIGINT, SIGTERM and SIGHUP, and
dies with this process. Its exit status is reported as subprocess does: 0 to 255, or minus the
number of the signal that killed it. If the helper is killed, the job is lost, which says nothing
about the job; the status is then EX_TEMPFAIL (75).

If no helper answers, the client starts one. A file lock makes sure that it is only one, however
many clients arrive at once. The helper inherits a socket that already listens, so that clients can
queue while it imports, and no other file: a daemon that keeps a workflow's pipes open would hold it
up. If it dies, the kernel closes the socket and the queued clients notice.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from lmlab.measure.warm_start.processes import kill_family, signal_group
from lmlab.measure.warm_start.socket_path import (
    WarmStartUnavailable,
    connect,
    helper_environment,
    listen,
    socket_path,
)

PATIENCE_S = 120.0  # importing torch from a cold network disk can take a minute
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ATTEMPTS = 2  # an idle helper may end just when a client connects
# By path: the helper must run the client's code, whatever directory it is started in.
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lmlab.measure.warm_start.helper import main; "
    "del sys.path[0]; main(*sys.argv[2:])"
)


class Job(NamedTuple):
    """A call of a module's main, and what a process inherits from its parent."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    umask: int
    ignored_signals: list[int]


def ignored_signals() -> list[int]:
    """Signals that children of this process ignore too (nohup, a shell's background job)."""
    # Python ignores these two itself, but not on behalf of its children.
    inherited = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(int(s) for s in inherited if signal.getsignal(s) is signal.SIG_IGN)


def run(module: str, arguments: Sequence[str], *, cold: bool = False) -> int:
    """Call `main(arguments)` of a module in a new process and return its exit status.

    `cold` asks for a fresh interpreter, for points that measure the start itself.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if not cold and _is_enabled():
        try:
            return _run_warm(module, list(arguments))
        except OSError as reason:
            _warn(f"{reason}; using a fresh process instead")
    return _run_plain(module, arguments)


def _is_enabled() -> bool:
    setting = os.environ.get("LMLAB_WARM_START", "1")
    if setting not in ("0", "1"):
        raise ValueError(f"LMLAB_WARM_START = {setting!r}; allowed: 0, 1")
    return setting == "1" and sys.platform == "linux"


def _idle_seconds() -> float:
    """How long a helper waits for another job before it ends."""
    setting = os.environ.get("LMLAB_WARM_START_IDLE_S", "300")
    with contextlib.suppress(ValueError):
        if 0 < float(setting) < float("inf"):
            return float(setting)
    raise ValueError(f"LMLAB_WARM_START_IDLE_S = {setting!r}; allowed: seconds above 0")


def _warn(message: str) -> None:
    print(f"warm start: {message}", file=sys.stderr, flush=True)


class SignalRelay:
    """While entered, signals that would end this process go to the job, which decides how to end.

    Signals that arrive before there is a job are held for it; ignored ones stay ignored.
    """

    def __init__(self) -> None:
        self._job: int | None = None
        self._held: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._relay)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]

    def aim(self, job: int) -> None:
        """Name the job, and forward to it what has arrived so far."""
        self._job = job
        while self._held:
            signal_group(job, self._held.pop(0))

    def _relay(self, number: int, _frame: FrameType | None) -> None:
        if self._job is None:
            self._held.append(number)
        else:
            signal_group(self._job, number)


def _run_warm(module: str, arguments: list[str]) -> int:
    os.umask(umask := os.umask(0o077))
    environment = dict(os.environ)
    job = Job(module, arguments, environment, os.getcwd(), umask, ignored_signals())
    for _ in range(_ATTEMPTS):
        with _connect_or_start() as connection, contextlib.suppress(ConnectionError):
            connection.settimeout(PATIENCE_S)
            connection.recv(1)  # a greeting: while the helper imports, signals still end us
            with SignalRelay() as relay:
                socket.send_fds(connection, [b"\n"], [0, 1, 2])
                # ASCII, so that bytes that are not UTF-8 survive as escaped surrogates.
                connection.sendall(json.dumps(job).encode() + b"\n")
                status = _follow(connection, relay)
            if status is not None:
                return status
    raise WarmStartUnavailable(f"the helper ended; see {socket_path().with_suffix('.log')}")


def _run_plain(module: str, arguments: Sequence[str]) -> int:
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    program = [sys.executable, "-m", "lmlab.measure.warm_start.supervisor", str(descriptor), module]
    with ours, SignalRelay() as relay:
        with theirs:
            process = subprocess.Popen(
                [*program, *arguments], pass_fds=[descriptor], start_new_session=True
            )
        status = _follow(ours, relay)
        process.wait()
    return os.EX_TEMPFAIL if status is None else status


def _follow(connection: socket.socket, relay: SignalRelay) -> int | None:
    """Wait for the job to end; its exit status, or None if the job was not started."""
    pid = status = ""
    with contextlib.suppress(ConnectionError), connection.makefile() as lines:
        if pid := lines.readline():
            relay.aim(int(pid))
            connection.settimeout(None)
            status = lines.readline()
    if pid and not status:
        kill_family(int(pid))
        _warn("the job was lost because its helper or supervisor was killed")
        return os.EX_TEMPFAIL
    return int(status) if pid else None


def _connect_or_start() -> socket.socket:
    """A connection to a helper that is equivalent to this process."""
    idle_s = _idle_seconds()
    path = socket_path()
    if connection := connect(path):
        return connection
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (connection := connect(path)) is None:
            _start_helper(path, idle_s)
            connection = connect(path)
    if connection is None:
        raise WarmStartUnavailable(f"no helper at {path}; see the log next to it")
    return connection


def _start_helper(path: Path, idle_s: float) -> None:
    with listen(path) as listener, path.with_suffix(".log").open("w") as log:
        package_root, descriptor = Path(__file__).parents[3], listener.fileno()
        arguments = [str(package_root), str(descriptor), str(path), str(idle_s)]
        # Returns at once: the program forks, so that the helper is not a child of this process.
        subprocess.run(
            [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=path.parent,
            env=helper_environment(),
            pass_fds=[descriptor],
            start_new_session=True,
            check=False,
        )
