"""The helper: torch imported, nothing run, nothing of CUDA touched; it forks a child for each job.

One thread and one selector serve any number of clients. A connection is a job's lifeline: when the
client goes, however it goes, the kernel closes it and the job's whole family is killed; when the
job ends, its exit is the last message. Children are looked at with waitid before they are reaped,
so that a job's pid still stands for it while its family is being ended. As sub-reaper the helper
also inherits what a job orphaned, and ends that once no job is left that it could belong to.

Python's SIGCHLD handler runs between bytecodes and a selector may sleep through that; the wake-up
descriptor turns the signal into something that the selector sees.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from lmlab.measure.warm_start.child import live
from lmlab.measure.warm_start.libraries import import_ahead, library_path, quiet_fork
from lmlab.measure.warm_start.messages import Inbox, Job, send
from lmlab.measure.warm_start.processes import adopt_orphans, kill_family, live_processes
from lmlab.measure.warm_start.starting import READY, listen

_LONGEST_LOG_BYTES = 1 << 20


class Connection:
    """A client, what it has sent so far, and its job once there is one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.inbox = Inbox(connection)
        self.job: int | None = None

    def reply(self, message: dict[str, Any]) -> None:
        """Tell the client, unless it is gone: its end is noticed when it is read from."""
        with contextlib.suppress(OSError):
            send(self.socket, message)

    def close(self) -> None:
        self.inbox.close_streams()
        self.socket.close()


class Helper:
    """Serves jobs at a socket until it is told to stop or nobody has asked for a while."""

    def __init__(self, path: Path, idle_s: float) -> None:
        self._path, self._idle_s, self._library_path = path, idle_s, library_path()
        self._started = self._last_active = time.monotonic()
        self._served = 0
        self._stopping = False
        self._connections: set[Connection] = set()
        self._jobs: dict[int, Connection] = {}
        self._listener = listen(path)
        self._inode = path.stat().st_ino
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._watch_signals()

    def serve(self) -> None:
        """Answer clients until the end, then leave nothing behind."""
        while not self._stopping:
            idle_left = self._last_active + self._idle_s - time.monotonic()
            if not self._jobs and idle_left <= 0:
                break
            for key, _ in self._selector.select(None if self._jobs else idle_left):
                key.data()
            self._reap()
        self._end()

    def _watch_signals(self) -> None:
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        signal.set_wakeup_fd(self._wake_up.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        # What a terminal sends is its clients' affair.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _stop(self) -> None:
        self._stopping = True

    def _accept(self) -> None:
        try:
            connection = Connection(self._listener.accept()[0])
        except OSError:  # the client gave up first
            return
        self._connections.add(connection)
        self._selector.register(
            connection.socket, selectors.EVENT_READ, lambda: self._read(connection)
        )

    def _read(self, connection: Connection) -> None:
        connection.inbox.drain()
        if connection.inbox.ended:
            if connection.job is not None:
                log(f"the client of job {connection.job} is gone: the job is killed")
                kill_family(connection.job)
            self._drop(connection)
        elif (message := connection.inbox.next_message()) is not None:
            self._answer(connection, message)

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.close()

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        if "job" in message:
            self._take(connection, Job(**message["job"]))
        elif "stop" in message:
            self._stop()
        elif "status" in message:
            age_s = time.monotonic() - self._started
            counts = {"served": self._served, "running": sorted(self._jobs)}
            connection.reply({"pid": os.getpid(), "age_s": age_s, **counts})

    def _take(self, connection: Connection, job: Job) -> None:
        try:
            self._fork(connection, job)
        except OSError as error:
            connection.reply({"trouble": f"the helper cannot start the job: {error}"})

    def _fork(self, connection: Connection, job: Job) -> None:
        helper = os.getpid()
        # Blocked until the child has handlers of its own: these would stop the wrong process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = quiet_fork()
            if pid == 0:
                self._become(job, connection, helper)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
        connection.job = pid
        self._jobs[pid] = connection
        self._served += 1
        connection.inbox.close_streams()
        connection.reply({"pid": pid})

    def _become(self, job: Job, connection: Connection, helper: int) -> NoReturn:
        """In the child: live as the job, and never come back into the helper's loop."""
        try:
            live(job, self._let_go_of_all_but(connection), helper, self._library_path)
        finally:
            os._exit(1)

    def _let_go_of_all_but(self, own: Connection) -> list[int]:
        """Close what is the helper's, and keep the job's streams."""
        streams, own.inbox.streams = own.inbox.streams, []
        signal.set_wakeup_fd(-1)
        for connection in self._connections:
            connection.close()
        for thing in (self._selector, self._listener, self._wake_up, self._woken):
            thing.close()
        return streams

    def _reap(self) -> None:
        """Take note of every child that has ended, jobs and adopted orphans alike."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, look)) is not None:
                if ended.si_pid in self._jobs:
                    self._finish(ended.si_pid)
                else:
                    os.waitpid(ended.si_pid, 0)

    def _finish(self, pid: int) -> None:
        kill_family(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection = self._jobs.pop(pid)
        if not self._jobs:
            self._end_orphans()
        connection.reply({"exit": status})
        self._drop(connection)
        self._last_active = time.monotonic()

    def _end_orphans(self) -> None:
        for pid, kinship in live_processes().items():
            if kinship.parent == os.getpid():
                kill_family(pid)

    def _end(self) -> None:
        # First the name, then the door: a client that finds no name starts another helper.
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        self._listener.close()
        for pid in list(self._jobs):
            kill_family(pid)
            self._finish(pid)
        log(f"ended after {self._served} jobs")


def log(line: str) -> None:
    """Write to the log, which starts over when it is full."""
    if os.fstat(2).st_size > _LONGEST_LOG_BYTES:
        os.ftruncate(2, 0)
    os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode(errors="replace"))


def main(arguments: list[str]) -> None:
    """Become a daemon, import, listen, say so, serve."""
    path, ready, idle_s = arguments
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # A client may have been told to ignore it; then the kernel would reap our forks before we do.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    with os.fdopen(int(ready), "w") as announcement:
        try:
            import_ahead()
            helper = Helper(Path(path), float(idle_s))
        except Exception as error:
            announcement.write(f"the helper cannot start: {type(error).__name__}: {error}")
            raise
        sys.stdout.flush()
        log(f"helper {os.getpid()} listens at {path}")
        announcement.write(READY)
    helper.serve()
