"""Process trees: finding and killing everything that a job has started.

A job is the leader of a session, and what it starts carries the job's pid as session id even after
the processes in between have exited. A process that opens a new session is still found as a
descendant, because an orphan is adopted by the nearest subreaper among its ancestors, which is the
job's supervisor. Only SIGKILL is used: a process may hang in a driver call and ignore the rest.

When the process that would clean up is itself killed, the kernel takes over: PR_SET_PDEATHSIG sends
a signal to a child as soon as its parent dies.
"""

import contextlib
import ctypes
import os
import signal

# From <linux/prctl.h>; Python has no names for these.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, even if that has already happened."""
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_on_parent_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def live_processes() -> dict[int, tuple[int, int]]:
    """Parent and session id of every visible process that is not a zombie."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/stat", "rb") as stat:
                # The command name is in parentheses and may itself contain some.
                fields = stat.read().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                found[int(pid)] = (int(fields[1]), int(fields[3]))
    return found


def family(root: int) -> set[int]:
    """The live processes of session `root`, and the descendants of `root` and of those."""
    processes = live_processes()
    members = {pid for pid, (_, session) in processes.items() if root in (pid, session)}
    while new := {pid for pid, (parent, _) in processes.items() if parent in members} - members:
        members |= new
    return members


def kill_family(root: int) -> None:
    """Kill all of `family(root)` except this process, until no new member appears."""
    done = {os.getpid()}
    while members := family(root) - done:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        done |= members


def signal_group(leader: int, number: int) -> None:
    """Signal a job's process group, or its leader if that has not created the group yet."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            os.kill(leader, number)
