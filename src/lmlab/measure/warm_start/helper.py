"""The helper: libraries imported, nothing run, no GPU touched; it forks a supervisor per client.

It waits for clients, for the end of supervisors and for SIGTERM, and ends by itself when idle. What
a killed supervisor leaves behind is adopted by the helper and killed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from lmlab.measure.warm_start.client import PATIENCE_S, Job
from lmlab.measure.warm_start.job import run_in_fork
from lmlab.measure.warm_start.preload import preload
from lmlab.measure.warm_start.processes import (
    adopt_orphans,
    die_with_parent,
    kill_family,
    live_processes,
)
from lmlab.measure.warm_start.supervisor import EVENTS, receive_events_as_signals, supervise


def main(descriptor: str, path: str, idle_s: str) -> None:
    """Become a daemon, import the libraries, serve, and leave nothing behind."""
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses would be lost
    adopt_orphans()
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.listen()  # again, so that clients see this process as their peer
        preload()
        sys.stdout.flush()  # or each fork would write it again
        serve(listener, float(idle_s))
        Path(path).unlink(missing_ok=True)  # first, so that new clients start another helper
        kill_family(os.getpid())


def serve(listener: socket.socket, idle_s: float) -> None:
    """Fork a supervisor for each client until SIGTERM, or until idle for so many seconds."""
    listener.setblocking(False)
    receive_events_as_signals(listener)
    supervisors: set[int] = set()
    deadline = time.monotonic() + idle_s
    while True:
        supervisors.update(_accept(listener))
        if ended := set(_reap()):
            supervisors -= ended
            deadline = time.monotonic() + idle_s
            for pid, (parent, _) in live_processes().items():
                if parent == os.getpid() and pid not in supervisors:
                    kill_family(pid)
        remaining = idle_s if supervisors else deadline - time.monotonic()
        if remaining <= 0:
            return
        event = signal.sigtimedwait(EVENTS, remaining)
        if event is not None and event.si_signo == signal.SIGTERM:
            return


def _accept(listener: socket.socket) -> Iterator[int]:
    """Fork a supervisor for each client that waits."""
    helper = os.getpid()
    with contextlib.suppress(OSError):  # no client left, or no process to be had
        while True:
            client, _ = listener.accept()
            with client:
                if (pid := os.fork()) == 0:
                    _become_supervisor(listener, client, helper)
                yield pid


def _become_supervisor(listener: socket.socket, client: socket.socket, helper: int) -> NoReturn:
    """In the fork: read the client's request, carry it out, and end."""
    try:
        die_with_parent(helper)
        listener.close()
        client.settimeout(PATIENCE_S)
        client.sendall(b"\n")
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile() as lines:
            request = lines.readline()
        client.settimeout(None)
        # A client that has closed its connection by now has run the job elsewhere.
        if request and not select.select([client], [], [], 0)[0]:
            job = Job(*json.loads(request))
            supervise(partial(run_in_fork, job), client, helper, job.ignored_signals, streams)
    except (ConnectionError, TimeoutError):
        pass  # the client is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _reap() -> Iterator[int]:
    """The children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            yield pid
