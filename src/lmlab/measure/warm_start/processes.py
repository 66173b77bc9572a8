"""Who belongs to a job, and how all of it ends.

A job is a session: its first process calls setsid, so whatever it starts carries the job's pid as
session id even after the parents in between are gone. A process that opens a session of its own is
still found as a descendant while its parent lives; one that is orphaned as well falls to the
nearest sub-reaper, which is the helper. Only SIGKILL is used here: these are the ways out that must
not depend on the good will of a process that may hang in a driver call.

The kernel's own tie between parent and child, PR_SET_PDEATHSIG, covers the case in which nobody is
left to send anything: the process that would have cleaned up was itself killed.
"""

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass

# Numbers of <linux/prctl.h>, which Python has no names for.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Kinship:
    """Where one live process hangs in the tree of processes."""

    parent: int
    session: int


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process as soon as the given parent is gone.

    The parent may have gone before the request was in force, which shows as another parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def live_processes() -> dict[int, Kinship]:
    """Every process of this machine that can still be seen and is not a zombie."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            kinship = _kinship(int(entry))
            if kinship is not None:
                found[int(entry)] = kinship
    return found


def _kinship(pid: int) -> Kinship | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in brackets and may itself hold brackets and blanks.
    state, parent, _group, session = text[text.rindex(b")") + 2 :].split()[:4]
    return None if state in (b"Z", b"X") else Kinship(int(parent), int(session))


def family(root: int) -> set[int]:
    """The live processes of the session `root`, and all who descend from it or from them."""
    processes = live_processes()
    members = {pid for pid, kin in processes.items() if pid == root or kin.session == root}
    while True:
        born = {pid for pid, kin in processes.items() if kin.parent in members} - members
        if not born:
            return members
        members |= born


def kill_family(root: int) -> None:
    """Kill all of `family(root)` but the caller, again until no new member turns up."""
    spared = {os.getpid()}
    while members := family(root) - spared:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        spared |= members


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a job's process group, or to its leader while the group is still to come."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, number)
