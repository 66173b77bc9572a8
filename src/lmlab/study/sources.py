"""Inspect source files without running them: syntax, names they may define, and other facts, which
are cached between processes.

The workflow is planned without importing a user's model, which would import torch; parsing the file
reveals a missing name or a syntax error before every job fails with it. Parsing hundreds of files
takes two seconds for every dry run and every point, so facts are cached by content hash, in a file
in the user's cache folder. Without that file everything works, only slower.
"""

import ast
import atexit
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lmlab.study.files import write_atomically

# With one of these, a module can have names that its text does not show.
HIDE_NAMES = frozenset({"*", "__getattr__", "globals", "setattr"})
MAX_ENTRIES = 1000


def parse(source: bytes, file: Path) -> ast.Module:
    """The syntax tree of a file, or a one-line ValueError."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, in some versions
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise ValueError(f"{where}: {getattr(error, 'msg', error)}") from error


def may_define(file: Path, name: str) -> bool:
    """Whether a module may define a name; also true if only running it could tell."""
    return not _names(file, file.stat().st_mtime_ns).isdisjoint({name, *HIDE_NAMES})


@lru_cache(maxsize=64)
def _names(file: Path, mtime_ns: int) -> set[str]:
    names = set()
    for node in ast.walk(parse(file.read_bytes(), file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names


def facts_of(source: bytes, compute: Callable[[bytes], Any], version: str) -> Any:
    """The result of `compute(source)`, which must be JSON, cached for this `version` of compute."""
    key = hashlib.sha256(version.encode() + b"\0" + source).hexdigest()
    store = _store()
    store[key] = store.pop(key) if key in store else compute(source)  # the latest used is last
    return store[key]


@cache
def _store() -> dict[str, Any]:
    """What earlier processes have computed; additions are saved when this process exits."""
    store: dict[str, Any] = {}
    # A missing, unreadable or truncated file is an empty store; so is an unknown home folder.
    with contextlib.suppress(OSError, ValueError, RuntimeError, TypeError):
        store.update(json.loads(_path().read_text()))
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
