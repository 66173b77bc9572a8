"""One measurement at a time: a lock that every measuring process of a user takes.

Two measurements that share a device measure each other. Within one workflow the scheduler keeps
them apart, but nothing stops a second workflow, or a hand-started measurement, beside it. The
lock is `flock` on a small file in the temporary folder: the kernel releases it when its holder
dies, however it dies, so there is nothing stale to clean up. The file itself stays; removing it
would let two processes lock two files of the same name.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SILENT_WAIT_S = 1.0
_POLL_S = 0.05


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock `name` (a device, usually) for the block; waits for whoever holds it."""
    path = lock_path(name)
    # Not followed if it is a link, and readable by its owner only: temporary folders are shared.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(descriptor, name)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        # Said aloud, because closing alone would leave it to a forked child that has a copy.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def lock_path(name: str) -> Path:
    """Where the lock `name` of this user lives."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return Path(tempfile.gettempdir()) / f"lmlab-{os.getuid()}-{safe}.lock"


def _wait_for(descriptor: int, name: str) -> None:
    started = time.monotonic()
    told = False
    while not _try_lock(descriptor):
        if not told and time.monotonic() - started > _SILENT_WAIT_S:
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            print(
                f"waiting for another measurement on {name} to finish (process {holder})",
                file=sys.stderr,
                flush=True,
            )
            told = True
        time.sleep(_POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
