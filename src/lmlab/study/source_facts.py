"""What is known of a source file, kept between processes: parsing hundreds takes two seconds.

The workflow is parsed for every dry run, and most files are as they were. What follows from a file
(its hash as a tree, its imports) is kept under the hash of its bytes, so it cannot be out of date:
an edited file is another file. The store is a file of the user's cache folder; without it, or where
it cannot be written, everything works the same, slower.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lmlab.study.files import write_atomically

MOST_KEPT = 5000


def facts_of(source: bytes, work_out: Callable[[bytes], Any], made_by: str) -> Any:
    """What `work_out` says of the source, as JSON gives it back; `made_by` names its version."""
    key = hashlib.sha256(made_by.encode() + b"\0" + source).hexdigest()
    store = _store()
    if key not in store:
        store[key] = work_out(source)
    return store[key]


@cache
def _store() -> dict[str, Any]:
    """What earlier processes have left; what is new is added to it at the end."""
    kept: dict[str, Any] = {}
    # A file that is not there, not readable or not whole is an empty store.
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(_path().read_text())
    before = len(kept)

    def leave() -> None:
        if len(kept) == before:
            return
        newest = dict(list(kept.items())[-MOST_KEPT:])
        with contextlib.suppress(OSError):  # a home that cannot be written to
            write_atomically(_path(), json.dumps(newest))

    atexit.register(leave)
    return kept


def _path() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "lmlab", "sources.json")
