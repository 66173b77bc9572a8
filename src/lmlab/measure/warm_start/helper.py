"""The helper: torch imported, nothing run, nothing of CUDA touched; it forks a child for each job.

One thread and one selector serve any number of clients. A connection is a job's lifeline: when the
client goes, however it goes, the kernel closes it and the job's whole family is killed; when the
job ends, its exit is the last message. Children are looked at with waitid before they are reaped, so
that a job's pid still stands for it while its family is being ended. As sub-reaper the helper also
inherits what a job orphaned, and ends that once no job is left that it could belong to.

Python's SIGCHLD handler runs between bytecodes and a selector may sleep through that; the wake-up
descriptor turns the signal into something that the selector sees.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from lmlab.measure.warm_start.child import live
from lmlab.measure.warm_start.meeting_place import address
from lmlab.measure.warm_start.messages import Inbox, Job, send
from lmlab.measure.warm_start.processes import adopt_orphans, kill_family, live_processes
from lmlab.measure.warm_start.starting import READY

# The constructor of every torch optimizer imports torch._dynamo, which takes as long as torch itself.
IMPORTED_AHEAD = ("torch", "triton", "torch._dynamo")
_MAY_BE_PRELOADED = {"torch", "triton"}
_LONGEST_LOG_BYTES = 1 << 20


class NotForkableError(RuntimeError):
    """This process can no longer be copied safely."""


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

    def __init__(self, path: Path, idle_s: float, library_path: list[str]) -> None:
        self._path, self._idle_s, self._library_path = path, idle_s, library_path
        self._started = self._last_active = time.monotonic()
        self._served = 0
        self._stopping = False
        self._connections: set[Connection] = set()
        self._jobs: dict[int, Connection] = {}
        self._listener = _listen(path)
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
        for number in (
            signal.SIGINT,
            signal.SIGHUP,
        ):  # a terminal's signals are its clients' affair
            signal.signal(number, signal.SIG_IGN)

    def _stop(self) -> None:
        self._stopping = True

    def _accept(self) -> None:
        connection = Connection(self._listener.accept()[0])
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
            try:
                self._fork(connection, Job(**message["job"]))
            except (OSError, ImportError, NotForkableError) as error:
                connection.reply({"trouble": f"the helper cannot start the job: {error}"})
        elif "stop" in message:
            self._stop()
        age_s = time.monotonic() - self._started
        report = {"pid": os.getpid(), "age_s": age_s, "served": self._served}
        if "status" in message:
            connection.reply({**report, "running": sorted(self._jobs)})

    def _fork(self, connection: Connection, job: Job) -> None:
        import_ahead(job.preload)
        helper = os.getpid()
        # Blocked until the child has handlers of its own: these would stop the wrong process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads: OpenBLAS has some, and puts them away around a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                live(job, self._let_go_of_all_but(connection), helper, self._library_path)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
        connection.job = pid
        self._jobs[pid] = connection
        self._served += 1
        connection.inbox.close_streams()
        connection.reply({"pid": pid})

    def _let_go_of_all_but(self, own: Connection) -> list[int]:
        """In the child: close what is the helper's, and keep the job's streams."""
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


def _listen(path: Path) -> socket.socket:
    """Listen under a name of our own, then take the agreed one, whatever a dead helper left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    passing = path.with_suffix(f".{os.getpid()}")
    with address(passing) as place:
        listener.bind(place)
    listener.listen(128)
    passing.replace(path)
    return listener


def import_ahead(names: list[str]) -> None:
    """Import libraries for all children to come, and make sure that they can still be forked."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        if name.partition(".")[0] not in _MAY_BE_PRELOADED:
            raise NotForkableError(f"{name!r} is not of {sorted(_MAY_BE_PRELOADED)}")
        importlib.import_module(name)
    if missing:
        if _touched_cuda():
            raise NotForkableError(f"CUDA is in use after importing {', '.join(missing)}")
        gc.collect()
        gc.freeze()  # else the collector writes to every object's header, and unshares its page


def _touched_cuda() -> bool:
    """Whether the driver's devices are open, which cuInit leaves them; asks CUDA nothing."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
    return False


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
    adopt_orphans()
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    theirs = {"", *(os.path.abspath(entry) for entry in python_path)}
    library_path = [entry for entry in sys.path if entry not in theirs]
    with os.fdopen(int(ready), "w") as announcement:
        try:
            import_ahead([name for name in IMPORTED_AHEAD if _is_installed(name)])
            helper = Helper(Path(path), float(idle_s), library_path)
        except Exception as error:
            announcement.write(f"the helper cannot start: {type(error).__name__}: {error}")
            raise
        sys.stdout.flush()
        log(f"helper {os.getpid()} listens at {path}")
        announcement.write(READY)
    helper.serve()


def _is_installed(name: str) -> bool:
    return name == "torch" or importlib.util.find_spec(name.partition(".")[0]) is not None
