"""Finding the helper, or starting one: exactly one, however many clients arrive at once.

A lock on a file beside the socket orders the clients; who gets it looks again before starting. A
socket that nobody answers is what a killed helper left behind, and the next one replaces it. The
helper tells through a pipe that it listens, or why it cannot; the pipe's end without a word means
that it died. Nothing else of the client stays open in it: a workflow waits for the end of its jobs'
pipes, and a daemon that keeps one open holds up everything.
"""

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lmlab.measure.warm_start.meeting_place import (
    MeetingPlace,
    WarmStartUnavailable,
    address,
    meeting_place,
)

READY = "ready"
PATIENCE_S = 120.0  # importing torch from a cold network disk can take a minute
_DEFAULT_IDLE_S = 300.0
# Handed over by path: the helper must run the client's code, whatever folder it is started in.
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lmlab.measure.warm_start.helper import main; "
    "del sys.path[0]; main(sys.argv[2:])"
)


class WarmStartSettingError(ValueError):
    """An environment variable of the warm start has a value that means nothing."""


def idle_seconds() -> float:
    """How long a helper waits for another job before it ends."""
    text = os.environ.get("LMLAB_WARM_START_IDLE_S", str(_DEFAULT_IDLE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise WarmStartSettingError(
            f"LMLAB_WARM_START_IDLE_S is {text!r}: a number of seconds above 0 is allowed"
        )
    return seconds


def find_or_start() -> socket.socket:
    """A connection to this process's helper."""
    idle_s = idle_seconds()
    place = meeting_place()
    connection = connect(place.socket)
    if connection is not None:
        return connection
    with _locked(place.lock):
        connection = connect(place.socket)
        if connection is None:
            _start(place, idle_s)
            connection = connect(place.socket)
    if connection is None:
        raise WarmStartUnavailable(f"the helper does not answer at {place.socket}")
    return connection


def connect(path: Path) -> socket.socket | None:
    """A connection to the helper that listens there, if one does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address(path) as place:
            connection.connect(place)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise WarmStartUnavailable(f"{path} cannot be reached: {error.strerror}") from error
    return connection


def listen(path: Path) -> socket.socket:
    """Listen under a passing name, then take the agreed one from whatever a dead helper left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    passing = path.with_suffix(f".{os.getpid()}")
    with address(passing) as place:
        listener.bind(place)
    listener.listen(128)
    passing.replace(path)
    return listener


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(place: MeetingPlace, idle_s: float) -> None:
    """Start a helper and wait until it listens."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answer:
        try:
            _launch(place, idle_s, writing)
        finally:
            os.close(writing)
        if not select.select([answer], [], [], PATIENCE_S)[0]:
            raise WarmStartUnavailable(f"the helper did not start within {PATIENCE_S:.0f} s")
        said = answer.read().decode(errors="replace")
    if said != READY:
        raise WarmStartUnavailable(said or f"the helper died while starting, see {place.log}")


def _launch(place: MeetingPlace, idle_s: float, ready: int) -> None:
    package_root = Path(__file__).parents[3]
    words = [str(package_root), str(place.socket), str(ready), str(idle_s)]
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log = os.open(place.log, log_flags, 0o600)
    try:
        # It forks once more and leaves, so that the helper is nobody's zombie when it ends.
        subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=place.directory,  # holds nothing that could be imported by mistake
            pass_fds=[ready],
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(log)
