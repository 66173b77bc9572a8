"""A source file read as text: whether it is valid Python, and which names it may define.

The workflow is planned without importing a user's model, which would import torch. A missing name
or a syntax error would then fail in every job, one by one; read as text, the file shows both before
any job starts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# With one of these, a module can have names that its text does not show.
HIDE_NAMES = frozenset({"*", "__getattr__", "globals", "setattr"})


class BrokenSource(ValueError):
    """A file that is not valid Python, in one line."""


def parse(source: bytes, file: Path) -> ast.Module:
    """The syntax tree of a file's text, or a `BrokenSource`."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:  # the latter, in some versions, for null bytes
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise BrokenSource(f"{where}: {getattr(error, 'msg', error)}") from error


def may_define(file: Path, name: str) -> bool:
    """Whether a module can have that name; also true if only running it would show."""
    return not _names(file, file.stat().st_mtime_ns).isdisjoint({name, *HIDE_NAMES})


@lru_cache(maxsize=64)
def _names(file: Path, mtime_ns: int) -> frozenset[str]:
    return frozenset(_names_in(parse(file.read_bytes(), file)))


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id
