"""Warm start: a study pays for importing torch once, not once per point.

Importing torch and starting CUDA takes 5 to 6 s on a GPU host; many points take less than one. So a
helper process imports the libraries once and listens on a Unix socket. For each job it forks a
supervisor, which forks the job: a fork copies page tables, not libraries, and is ready within
milliseconds. The client, this module, needs no torch.

    client --socket--> helper --fork--> supervisor --fork--> job

Without a helper (LMLAB_WARM_START=0, or any problem with it) a fresh interpreter acts as the
supervisor: slower, but otherwise the same. Either way the job runs in a new session, receives the
client's SIGINT, SIGTERM and SIGHUP, and dies with the client. If its supervisor is killed, the job
is lost and its status is EX_TEMPFAIL (75), whatever the job did.

If no helper answers, the client starts one, under a file lock. It inherits a listening socket, so
clients can queue while it imports, but none of the workflow's pipes, which it would hold open.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmlab.measure.warm_start.processes import kill_family, relay_signals
from lmlab.measure.warm_start.socket_path import connect, socket_path

ANSWER_TIMEOUT_S = 120.0  # importing torch from a cold network disk can take a minute
NO_ANSWER = f"ended or did not answer within {ANSWER_TIMEOUT_S:g} s"


def run(module: str, arguments: Sequence[str]) -> int:
    """Call `main(arguments)` of a module in a new process and return its exit status."""
    if (setting := os.environ.get("LMLAB_WARM_START", "1")) not in ("0", "1"):
        raise ValueError(f"LMLAB_WARM_START = {setting!r}; allowed: 0, 1")
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # ASCII, so that bytes that are not UTF-8 survive as escaped surrogates.
    job = json.dumps([module, list(arguments), dict(os.environ), os.getcwd()])
    if setting == "1":
        try:
            return _run_warm(job)
        except OSError as reason:
            print(f"warm start: {reason}; using a fresh process instead", file=sys.stderr)
    ours, theirs = socket.socketpair()
    with _start(theirs):
        theirs.close()
        status = _run_at(ours, job)
    if status is None:
        print(f"warm start: the fresh process {NO_ANSWER}", file=sys.stderr)
        return os.EX_TEMPFAIL
    return status


def _run_warm(job: str) -> int:
    """Run the job in a fork of the helper that is equivalent to this process."""
    path = socket_path()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connect(path) or _start_helper(path)
    if connection is None or (status := _run_at(connection, job)) is None:
        raise ConnectionError(f"the helper {NO_ANSWER}; see {path.with_suffix('.log')}")
    return status


def _start_helper(path: Path) -> socket.socket | None:
    """Start a helper and connect to it; it daemonizes, so it is not a child of this process."""
    path.unlink(missing_ok=True)  # left behind by a helper that was killed
    with socket.socket(socket.AF_UNIX) as listener, path.with_suffix(".log").open("w") as log:
        listener.bind(str(path))
        listener.listen()
        _start(listener, stdin=subprocess.DEVNULL, stdout=log, stderr=log).wait()
        return connect(path)


def _start(inherited: socket.socket, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process that serves this socket: a helper, or the supervisor of one job."""
    descriptor = inherited.fileno()
    # By path: it must run the client's code, whatever directory it is started in.
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
        f"from lmlab.measure.warm_start.helper import main; del sys.path[0]; main({descriptor})"
    )
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True, **streams)


def _run_at(connection: socket.socket, job: str) -> int | None:
    """Send a job and wait until it ends; its exit status, or None if it was not started."""
    pid = None
    connection.settimeout(ANSWER_TIMEOUT_S)
    # If the other end is closed, `readline` returns "" and `int` raises ValueError.
    gone = suppress(ConnectionError, TimeoutError, ValueError)
    with connection, connection.makefile() as lines, gone:
        # Send no streams before the helper is ready: while importing, it would hold them open even
        # after this process has ended. Until it answers, a signal simply ends this process.
        lines.readline()
        with relay_signals() as set_target:
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            connection.sendall(f"{job}\n".encode())
            pid = int(lines.readline())
            set_target(pid)
            connection.settimeout(None)
            return int(lines.readline())
    if pid is None:
        return None
    kill_family(pid)
    print("warm start: the job was lost because its supervisor was killed", file=sys.stderr)
    return os.EX_TEMPFAIL
