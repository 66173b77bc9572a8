"""A hash of the code that a measurement runs: what makes a result stale.

A number depends on the source files that produced it, and on no others. Which files those are is
found without running them: from the modules a point names, every `import` statement (at any depth)
that leads to a module of the same packages is followed. Each file is then hashed as a syntax tree
without comments, docstrings or positions, so that explaining the code better measures nothing anew.

A module that lies beside a root (a user's model and the files next to it) counts as its own package
does; what is installed elsewhere is known by its version.

The tree is written out by hand rather than with `ast.dump`: that text differs between Python
versions (3.12 added fields that 3.11 lacks), and a result measured on one must be recognised on
the other. Limits: imports built from strings are not seen (registries name their modules, and the
caller passes those in as roots), nor are data files.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from lmlab.study.source_facts import facts_of
from lmlab.study.source_text import parse

# Fields that carry no meaning for what the code does, or that only some Python versions have.
IGNORED_FIELDS = frozenset({"kind", "type_comment", "ctx", "type_ignores"})
# Fields that hold statements, or what holds them in turn (handlers, cases).
NESTING = ("body", "orelse", "finalbody", "handlers", "cases")
# Another way to hash is another store.
MADE_BY = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class UnknownModule(ValueError):
    """A module that code names, and that no file on the search path holds."""


def code_fingerprint(
    roots: Iterable[str],
    search_path: Sequence[str] | None = None,
    *,
    leaving_out: Collection[str] = (),
) -> str:
    """One hash over every file in the import closure of the modules named.

    Modules left out, by name or pattern, are followed, but their own text does not count: a list of
    variants, say, of which the one that matters is among the roots.
    """
    digest = hashlib.sha256()
    for name, file in sorted(import_closure(roots, search_path).items()):
        if not any(fnmatchcase(name, pattern) for pattern in leaving_out):
            digest.update(f"{name}\0{_facts(file, file.stat().st_mtime_ns)['hash']}\0".encode())
    return digest.hexdigest()[:16]


def import_closure(
    roots: Iterable[str], search_path: Sequence[str] | None = None
) -> dict[str, Path]:
    """Module name to file, for the roots and all they import from the roots' own packages."""
    path = tuple(search_path if search_path is not None else sys.path)
    roots = list(roots)
    homes = frozenset(_home(root, path) for root in roots)
    found: dict[str, Path] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found or not _lives_in(homes, name.partition(".")[0]):
            continue
        file = locate(name, path)
        if file is None:  # `from package import function` names no module
            continue
        found[name] = file
        waiting += _ancestors(name)
        waiting += _imports(file, name, file.stat().st_mtime_ns)
    return found


def _home(root: str, path: tuple[str, ...]) -> str:
    """The folder that a root's top-level module or package lies in."""
    file = locate(root, path)
    if file is None:
        raise UnknownModule(f"module {root!r} is not on the Python path")
    depth = root.count(".") + (file.name == "__init__.py")
    return str(file.parents[depth])


@lru_cache(maxsize=4096)
def _lives_in(homes: frozenset[str], package: str) -> bool:
    """Whether a module or package of that name lies in one of the folders."""
    return any(
        Path(home, f"{package}.py").is_file() or Path(home, package, "__init__.py").is_file()
        for home in homes
    )


@lru_cache(maxsize=4096)
def locate(name: str, search_path: tuple[str, ...]) -> Path | None:
    """The file of a module, found without importing its parents (they may import torch)."""
    where: Sequence[str] | None = search_path
    file: str | None = None
    for depth, _ in enumerate(parts := name.split(".")):
        if where is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), list(where))
        if spec is None:
            return None
        where = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
        file = spec.origin
    return Path(file) if file and file.endswith(".py") else None


def _ancestors(name: str) -> list[str]:
    """Importing a module runs the `__init__` of every package above it."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


@lru_cache(maxsize=4096)
def _imports(file: Path, name: str, mtime_ns: int) -> tuple[str, ...]:
    """Every module that a file's import statements may lead to."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for level, module, imported in _facts(file, mtime_ns)["imports"]:
        base = _absolute(level, module, package)
        names.append(base)
        names += [f"{base}.{each}" for each in imported]
    return tuple(names)


@lru_cache(maxsize=4096)
def _facts(file: Path, mtime_ns: int) -> dict[str, Any]:
    """Keyed on the file's time too, so that a long-lived process sees an edit."""
    facts: dict[str, Any] = facts_of(file.read_bytes(), partial(_read, file), MADE_BY)
    return facts


def _read(file: Path, source: bytes) -> dict[str, Any]:
    tree = parse(source, file)
    return {"hash": _tree_hash(tree), "imports": list(_import_statements(tree))}


def _import_statements(tree: ast.Module) -> Iterator[list[Any]]:
    """Level, module, and the names taken from it, of every import statement."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield [0, alias.name, []]
        elif isinstance(node, ast.ImportFrom):
            yield [node.level, node.module or "", [alias.name for alias in node.names]]


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements at any depth; expressions, most of a tree, hold no import."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in NESTING:
            waiting += getattr(node, field, ())


def _absolute(level: int, module: str, package: str) -> str:
    if level == 0:
        return module
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - (level - 1)])
    return f"{base}.{module}" if module else base


def source_hash(source: str) -> str:
    """A hash of what the code does: the same for any comment, docstring or layout."""
    return _tree_hash(ast.parse(source))


def _tree_hash(tree: ast.Module) -> str:
    parts: list[str] = []
    _canonical(tree, parts.append)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _canonical(node: object, write: Callable[[str], None]) -> None:
    """The tree as text, leaving out empty fields: a field a newer Python adds is empty here."""
    if isinstance(node, ast.AST):
        write(f"({type(node).__name__}")
        for field in _fields(node._fields):
            value = getattr(node, field, None)
            if field == "body" and isinstance(node, DOCUMENTED):
                value = _without_docstring(node.body)
            if value is not None and value != []:
                write(f" {field}=")
                _canonical(value, write)
        write(")")
    elif isinstance(node, list):
        write("[")
        for item in node:
            _canonical(item, write)
            write(",")
        write("]")
    else:
        write(f"{type(node).__name__}:{node!r}")


@lru_cache(maxsize=256)
def _fields(names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name not in IGNORED_FIELDS)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body
