"""Warm start: a study pays for importing torch once, not once per point.

Importing torch and starting CUDA takes 5 to 6 s on a GPU host; many points take less than one. So a
helper process imports the libraries once and waits at a Unix socket (`socket_path`).
For each job it forks a supervisor, which forks the job: a fork copies page tables, not libraries,
and is ready within milliseconds. The client, this module, needs no torch.

    client --socket--> helper --fork--> supervisor --fork--> job

Without a helper (LMLAB_WARM_START=0, or any problem with it) a fresh interpreter is
the supervisor: slower, but otherwise the same. Either way the job runs in a new session, receives
the client's SIGINT, SIGTERM and SIGHUP, and dies with the client. If its supervisor is killed, the
job is lost, which says nothing about the job; its status is then EX_TEMPFAIL (75).

If no helper answers, the client starts one, under a file lock. It inherits a socket that already
listens, so that clients can queue while it imports, and no pipe of the workflow, which would wait.
"""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmlab.measure.warm_start.processes import kill_family, relay_signals
from lmlab.measure.warm_start.socket_path import connect, socket_path

PATIENCE_S = 120.0  # importing torch from a cold network disk can take a minute
# By path: the helper must run the client's code, whatever directory it is started in.
_PROGRAM = (
    *(sys.executable, "-P", "-c"),
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lmlab.measure.warm_start.helper import main; "
    "del sys.path[0]; main(int(sys.argv[2]))",
    str(Path(__file__).parents[3]),
)


class Job(NamedTuple):
    """A call of a module's main, and what a process inherits from its parent."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    umask: int


def run(module: str, arguments: Sequence[str]) -> int:
    """Call `main(arguments)` of a module in a new process and return its exit status."""
    if (setting := os.environ.get("LMLAB_WARM_START", "1")) not in ("0", "1"):
        raise ValueError(f"LMLAB_WARM_START = {setting!r}; allowed: 0, 1")
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.umask(umask := os.umask(0o077))
    job = Job(module, list(arguments), dict(os.environ), os.getcwd(), umask)
    if setting == "1":
        try:
            return _run_warm(job)
        except OSError as reason:
            _warn(f"{reason}; using a fresh process instead")
    return _run_fresh(job)


def _warn(message: str) -> None:
    print(f"warm start: {message}", file=sys.stderr, flush=True)


def _run_warm(job: Job) -> int:
    """Run the job in a fork of the helper that is equivalent to this process."""
    path = socket_path()
    if (connection := connect(path)) is None:
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = connect(path) or _start_helper(path)
    if connection is None or (status := _run_at(connection, job)) is None:
        raise ConnectionError(f"the helper ended; see {path.with_suffix('.log')}")
    return status


def _start_helper(path: Path) -> socket.socket | None:
    """A connection to a new helper; the program forks, so that it is not a child of this one."""
    path.unlink(missing_ok=True)  # left behind by a helper that was killed
    with socket.socket(socket.AF_UNIX) as listener, path.with_suffix(".log").open("w") as log:
        listener.bind(str(path))
        listener.listen()
        _start(listener, stdin=subprocess.DEVNULL, stdout=log, stderr=log).wait()
        return connect(path)


def _run_fresh(job: Job) -> int:
    ours, theirs = socket.socketpair()
    with _start(theirs):
        theirs.close()
        status = _run_at(ours, job)
    return os.EX_TEMPFAIL if status is None else status


def _start(inherited: socket.socket, **streams: Any) -> subprocess.Popen[bytes]:
    """A process that serves this socket: a new helper, or the supervisor of one job."""
    command, kept = [*_PROGRAM, str(inherited.fileno())], [inherited.fileno()]
    return subprocess.Popen(command, pass_fds=kept, start_new_session=True, **streams)


def _run_at(connection: socket.socket, job: Job) -> int | None:
    """Send a job, wait for its end and hang up; its exit status, or None if it was not started."""
    pid = status = ""
    connection.settimeout(PATIENCE_S)
    with connection, contextlib.suppress(ConnectionError), connection.makefile() as lines:
        # Streams sent to a helper that still imports would stay open after this process has ended;
        # and until it answers, a signal ends this process.
        if not lines.readline():
            return None
        with relay_signals() as aim:
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            # ASCII, so that bytes that are not UTF-8 survive as escaped surrogates.
            connection.sendall(json.dumps(job).encode() + b"\n")
            if pid := lines.readline():
                aim(int(pid))
                connection.settimeout(None)
                status = lines.readline()
    if pid and not status:
        kill_family(int(pid))
        _warn("the job was lost because its supervisor was killed")
        return os.EX_TEMPFAIL
    return int(status) if pid else None
