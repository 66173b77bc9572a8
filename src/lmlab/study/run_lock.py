"""One run per folder: a lock that cannot outlive the process that holds it.

Snakemake locks a folder with lock files, which a killed run leaves behind; the next run would then
refuse to start. So a run also holds a kernel lock on a file next to them, which is released when
the process ends. The run that gets it knows that any lock files are stale, and removes them.
"""

import fcntl
import os
import socket
from pathlib import Path


def acquire(snakemake_folder: Path) -> int:
    """Lock Snakemake's folder of records until this process ends; returns the lock file's
    descriptor. Raises a ValueError if another process holds the lock."""
    try:
        snakemake_folder.mkdir(exist_ok=True)
        handle = os.open(snakemake_folder / "lmlab.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        problem = f"{snakemake_folder}: {error.strerror}; a run keeps its records there"
        raise ValueError(problem) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        where = f"this folder ({snakemake_folder.resolve().parent})"
        raise ValueError(f"{owner} is running in {where}; wait for it or end it") from error
    here = socket.gethostname()
    before = os.pread(handle, 200, 0).decode(errors="replace").strip()
    # Not every shared file system propagates locks to other hosts, so their lock files stay.
    if not before or before.endswith(f" on {here}"):
        for mark in (snakemake_folder / "locks").glob("*.lock"):
            mark.unlink(missing_ok=True)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {here}\n".encode(), 0)
    return handle
