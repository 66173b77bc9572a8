"""A per-user lock that lets only one process measure on a device at a time.

Concurrent measurements on one device disturb each other. Within a workflow the scheduler separates
them, but nothing stops a second workflow or a measurement started by hand. The lock is `flock` on a
small file in the temporary directory: the kernel releases it whenever its holder dies, so there is
nothing stale to clean up. The file itself stays; removing it would let two processes lock two files
of the same name.
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
    """Hold the lock `name` (usually a device) for the block; waits for the current holder."""
    # Never follow a link, and private to its owner: temporary directories are shared.
    descriptor = os.open(lock_path(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(descriptor, name)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        # Explicitly, because closing alone would leave the lock to a forked child's copy.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def lock_path(name: str) -> Path:
    """Path of this user's lock `name`."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return Path(tempfile.gettempdir()) / f"lmlab-{os.getuid()}-{safe}.lock"


def _wait_for(descriptor: int, name: str) -> None:
    started = time.monotonic()
    reported = False
    while not _try_lock(descriptor):
        if not reported and time.monotonic() - started > _SILENT_WAIT_S:
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            print(
                f"waiting for another measurement on {name} to finish (process {holder})",
                file=sys.stderr,
                flush=True,
            )
            reported = True
        time.sleep(_POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
