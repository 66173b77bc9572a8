"""A cache folder for Snakemake where the user's home cannot be written, as in many batch jobs.

Snakemake and Triton keep copies of sources and kernels below the home folder, and end in a
traceback where they cannot. They get a temporary folder instead, for as long as this process runs.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path


def ensure_writable(environment: MutableMapping[str, str]) -> None:
    """Name a temporary cache folder in the environment if the usual one is of no use."""
    home = environment.get("HOME") or os.path.expanduser("~")
    folder = Path(environment.get("XDG_CACHE_HOME") or f"{home}/.cache") / "snakemake"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        temporary = tempfile.mkdtemp(prefix="lmlab-cache-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        environment["XDG_CACHE_HOME"] = temporary
        environment.setdefault("TRITON_HOME", temporary)
