"""Process trees: signaling, finding and killing everything that a job has started.

A job leads a session, so the processes it starts have the job's pid as session id. One that opens a
new session is still found as a descendant, because an orphan is adopted by the nearest subreaper
among its ancestors, which is the job's supervisor. Killing always uses SIGKILL: a process may hang
in a driver call and ignore other signals.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

GRACE_S = 2.0
"""How long a job may take to end after a signal; one that waits in a driver never would."""
relayed: list[int] = []
"""Signals that reached this process while it waited for a job."""


@contextlib.contextmanager
def relay_signals() -> Iterator[Callable[[int], None]]:
    """Forward signals that would end this process to a job, which must then end within `GRACE_S`.

    Yields a function that sets the job's pid; earlier signals are held until then. Ignored signals
    stay ignored. Main thread only, like all of Python's signal handlers.
    """
    held: list[int] = []
    leaders: list[int] = []

    def relay(number: int, _frame: object) -> None:
        relayed.append(number)
        held.append(number)
        set_target()

    def set_target(*leader: int) -> None:
        leaders.extend(leader)
        while held and leaders:
            pid, number = leaders[0], held.pop(0)
            with contextlib.suppress(ProcessLookupError):
                is_leader = os.getpgid(pid) == pid  # false until the fork calls setsid
                (os.killpg if is_leader else os.kill)(pid, number)
            timer = threading.Timer(GRACE_S, kill_family, leaders)
            undo.callback(timer.cancel)
            timer.start()

    with contextlib.ExitStack() as undo:
        undo.callback(lambda: list(map(signal.raise_signal, held)))  # no job was started
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, relay) or signal.SIG_DFL
                undo.callback(signal.signal, number, before)
        yield set_target


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, even if that has already happened."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def all_processes() -> dict[int, tuple[int, int]]:
    """Parent and session id of every visible process."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The command name is in parentheses and may itself contain some.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            found[int(pid)] = (int(fields[1]), int(fields[3]))
    return found


def kill_family(root: int) -> None:
    """Kill session `root` and all descendants except this process, until no new one appears."""
    done = {os.getpid()}
    while members := _family(root) - done:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        done |= members


def _family(root: int) -> set[int]:
    processes = all_processes()
    members = {pid for pid, (_, session) in processes.items() if root in (pid, session)}
    while new := {pid for pid, (parent, _) in processes.items() if parent in members} - members:
        members |= new
    return members
