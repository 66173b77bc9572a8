"""Facts about source files, cached between processes: parsing hundreds takes two seconds.

The workflow is parsed for every dry run, and every point computes its fingerprint. What follows
from a file (its hash as a tree, its imports) is cached under the hash of its bytes, so it cannot be
out of date. The store is one file in the user's cache folder; without it, or where it cannot be
written, everything works the same, slower.
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

MAX_ENTRIES = 5000


def facts_of(source: bytes, compute: Callable[[bytes], Any], version: str) -> Any:
    """What `compute`, in that version, returns for the source, as JSON gives it back."""
    key = hashlib.sha256(version.encode() + b"\0" + source).hexdigest()
    store = _store()
    if key not in store:
        store[key] = compute(source)
    return store[key]


@cache
def _store() -> dict[str, Any]:
    """What earlier processes have computed; additions are saved when this process exits."""
    store: dict[str, Any] = {}
    # A file that is missing, unreadable or cut off is an empty store; so is a home that is none.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        found = json.loads(_path().read_text())
        store = found if isinstance(found, dict) else store
    before = len(store)

    def save() -> None:
        if len(store) > before:
            newest = dict(list(store.items())[-MAX_ENTRIES:])
            with contextlib.suppress(OSError, RuntimeError):
                write_atomically(_path(), json.dumps(newest))

    atexit.register(save)
    return store


def _path() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "lmlab", "sources.json")
