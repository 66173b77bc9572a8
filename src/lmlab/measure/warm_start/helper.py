"""The helper and its supervisors: libraries imported, nothing run, no GPU touched.

The helper forks a supervisor for each client and ends by itself when idle. A supervisor adopts
whatever its job orphans, so that all processes of the job are its descendants. When the job ends,
or the client closes its connection (the kernel does that for a killed client), it kills them all.
Then it sends the exit status; a client that gets the job's pid and no status knows that the job was
lost. If the supervisor is killed, the kernel kills the job, and the helper adopts and kills the
rest. If the helper is killed, its supervisors and jobs go on.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lmlab.measure.warm_start.client import PATIENCE_S, Job
from lmlab.measure.warm_start.job import run_in_fork
from lmlab.measure.warm_start.preload import preload
from lmlab.measure.warm_start.processes import (
    adopt_orphans,
    die_with_parent,
    kill_family,
    live_processes,
)


def main(descriptor: str, path: str = "", idle_s: str = "") -> None:
    """Serve the clients of an inherited socket; without a path, the one client at its other end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses would be lost
    with socket.socket(fileno=int(descriptor)) as inherited:
        if not path:
            supervise(inherited)
            return
        if os.fork():  # the helper is nobody's child
            os._exit(0)
        os.chdir(Path(path).parent)
        adopt_orphans()
        inherited.listen()  # again, so that clients see this process as their peer
        preload()
        sys.stdout.flush()  # or each fork would write it again
        serve(inherited, float(idle_s))
        Path(path).unlink(missing_ok=True)


def serve(listener: socket.socket, idle_s: float) -> None:
    """Fork a supervisor for each client, until none has come and none is left for so long."""
    signal.signal(signal.SIGCHLD, lambda *_: _clean_up())
    listener.settimeout(idle_s)
    while True:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            if not _children():
                return
            continue
        with client, contextlib.suppress(OSError):  # no process to be had: the client notices
            _fork(_supervise_apart, listener, client)


def _supervise_apart(listener: socket.socket, client: socket.socket) -> None:
    listener.close()  # or clients of a helper that was killed would wait for an answer
    supervise(client)


def _clean_up() -> None:
    """Reap supervisors, and kill orphans: unlike supervisors, they are in a job's session."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    for pid, session in _children().items():
        if session != os.getsid(0):
            kill_family(pid)


def _children() -> dict[int, int]:
    """Session ids of this process's children."""
    alive, me = live_processes(), os.getpid()
    return {pid: session for pid, (parent, session) in alive.items() if parent == me}


def _fork(do: Callable[..., None], *arguments: object) -> int:
    """The pid of a child that does this and nothing else; it fails if this returns."""
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        do(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def supervise(client: socket.socket) -> None:
    """Run the job that the client asks for, unless the client is gone."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        client.settimeout(PATIENCE_S)
        client.sendall(b"\n")
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile() as lines:
            request = lines.readline()
        client.settimeout(None)
        # A client that has closed its connection by now has run the job elsewhere.
        if request and not select.select([client], [], [], 0)[0]:
            _run(Job(*json.loads(request)), streams, client)


def _run(job: Job, streams: Sequence[int], client: socket.socket) -> None:
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = _fork(_become, job, streams, client, os.getpid())
    for stream in streams:  # whoever reads them waits until every copy is closed
        os.close(stream)
    try:
        client.sendall(f"{pid}\n".encode())
        threading.Thread(target=_kill_without_client, args=(client,), daemon=True).start()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    finally:
        kill_family(os.getpid())
    # Reaped last: until then the client may signal the job, and its pid must not be reused.
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(f"{status}\n".encode())


def _kill_without_client(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        client.recv(1)  # a client sends nothing more, so this returns when it is gone
    kill_family(os.getpid())


def _become(job: Job, streams: Sequence[int], client: socket.socket, supervisor: int) -> None:
    """A session of its own, the client's streams, and the job."""
    os.setsid()
    die_with_parent(supervisor)
    client.close()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    run_in_fork(job)
