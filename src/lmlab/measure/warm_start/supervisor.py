"""The supervisor: one process per job, which makes sure that no process of the job survives.

It adopts whatever the job orphans, so that all processes of the job are its descendants. It waits
for the first of three events: the job ends, the client closes its connection (the kernel does that
for a killed client), or the parent dies. Then it kills all its descendants. If the supervisor
itself is killed, the kernel kills the job, and the helper adopts and kills the rest.

It sends the client the job's pid and, once all is over, the exit status. If there is no second
line, the job was lost.

Run as a program, it starts a job as a fresh interpreter, without a helper:
`python -m lmlab.measure.warm_start.supervisor CONNECTION MODULE ARGUMENTS...`
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

from lmlab.measure.warm_start.client import ignored_signals
from lmlab.measure.warm_start.processes import (
    adopt_orphans,
    die_with_parent,
    kill_family,
    signal_on_parent_death,
)

EVENTS = {signal.SIGCHLD, signal.SIGIO, signal.SIGTERM}


def receive_events_as_signals(connection: socket.socket) -> None:
    """Block all signals, to be waited for, and have SIGIO sent when the socket becomes readable.

    With everything a signal, one `sigwait` waits for child processes and sockets without a race.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)


def supervise(
    run: Callable[[], object],
    client: socket.socket,
    parent: int,
    ignored: Sequence[int],
    streams: Sequence[int] = (),
) -> None:
    """Call `run` in a forked session with the given streams and supervise it until it ends."""
    supervisor = os.getpid()
    adopt_orphans()
    receive_events_as_signals(client)
    signal_on_parent_death(signal.SIGTERM)
    job = os.fork()
    if job == 0:
        try:
            os.setsid()
            die_with_parent(supervisor)
            client.close()
            _reset_signals(ignored)
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
                os.close(stream)
            run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for stream in streams:  # whoever reads them waits until every copy is closed
        os.close(stream)
    try:
        client.sendall(f"{job}\n".encode())
        ended = _wait(job, client, parent)
    finally:
        kill_family(supervisor)
    if ended:
        # Reaped last: until then the client may signal the job, and its pid must not be reused.
        status = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
        client.sendall(f"{status}\n".encode())


def _wait(job: int, client: socket.socket, parent: int) -> bool:
    """Wait for the end of the job (True), or of the client or the parent (False)."""
    while os.waitid(os.P_PID, job, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        # The client sends nothing more, so its connection becomes readable when it is closed.
        if os.getppid() != parent or select.select([client], [], [], 0)[0]:
            return False
        if signal.sigwait(EVENTS) == signal.SIGTERM:
            return False
    return True


def _reset_signals(ignored: Sequence[int]) -> None:
    """The signal handlers of a process that has just been started."""
    for number in map(int, signal.valid_signals()):
        if number in ignored or signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def _exec_job(arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    program = [sys.executable, "-m", "lmlab.measure.warm_start.job", *arguments]
    os.execv(sys.executable, program)


def main(descriptor: str, *arguments: str) -> None:
    """Supervise a job in a fresh interpreter for the client at the other end of a socket."""
    ignored, parent = ignored_signals(), os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses would be lost
    with socket.socket(fileno=int(descriptor)) as client, contextlib.suppress(BrokenPipeError):
        supervise(lambda: _exec_job(list(arguments)), client, parent, ignored)


if __name__ == "__main__":
    main(*sys.argv[1:])
