"""A hash of the code that a measurement runs; a result is stale once it changes.

Starting from root modules, every `import` statement (at any depth) that leads to a module in the
roots' packages, or next to them, is followed statically; packages installed elsewhere are known by
their versions. Each file is hashed as a syntax tree without comments, docstrings or positions, so
documenting code does not make results stale. `ast.dump` is not used, because its output differs
between Python versions. A YAML file named like the module next to it is hashed with it. Imports
built from strings are not followed: callers pass the modules that registries name as roots.
"""

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from lmlab.study.sources import facts_of, parse

# Fields that do not change what the code does, or that only some Python versions have.
IGNORED_FIELDS = frozenset({"kind", "type_comment", "ctx", "type_ignores"})
VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_fingerprint(
    roots: Iterable[str], search_path: Sequence[str], *, excluded: Collection[str] = ()
) -> str:
    """One hash over every file in the import closure of the roots.

    Excluded modules (names or patterns) are followed, but not hashed themselves.
    """
    digest = hashlib.sha256()
    for name, file in sorted(import_closure(roots, search_path).items()):
        if not any(fnmatchcase(name, pattern) for pattern in excluded):
            digest.update(f"{name}\0{_facts(file, file.stat().st_mtime_ns)['hash']}\0".encode())
            if (data := file.with_suffix(".yaml")).is_file():
                import yaml  # here, so that hashing source code needs Python alone

                digest.update(repr(yaml.safe_load(data.read_text())).encode())
    return digest.hexdigest()[:16]


def import_closure(roots: Iterable[str], search_path: Sequence[str]) -> dict[str, Path]:
    """Module name to file, for the roots and all they import from the roots' own packages."""
    path = tuple(search_path)
    waiting = list(roots)
    homes = set()
    for root in waiting:
        if (file := locate(root, path)) is None:
            raise ValueError(f"module {root!r} is not on the Python path")
        homes.add(_home(root, file))
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = None if name in found else locate(name, path)
        # `from package import function` names no module.
        if file is None or _home(name, file) not in homes:
            continue
        found[name] = file
        parts = name.split(".")
        # Importing a module runs the `__init__` of every package above it.
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]
        waiting += _imports(file, name)
    return found


def _home(name: str, file: Path) -> Path:
    """The folder of a module's top-level module or package."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


@lru_cache(maxsize=4096)
def locate(name: str, search_path: tuple[str, ...]) -> Path | None:
    """The file of a module, found without importing its parents (they may import torch)."""
    where: Sequence[str] | None = search_path
    file: str | None = None
    for depth, _ in enumerate(parts := name.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), list(where)) if where else None
        if spec is None:
            return None
        where = list(spec.submodule_search_locations or ())
        file = spec.origin
    return Path(file) if file and file.endswith(".py") else None


def _imports(file: Path, name: str) -> Iterator[str]:
    """Every module that a file's import statements may lead to."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for level, module, imported in _facts(file, file.stat().st_mtime_ns)["imports"]:
        with suppress(ImportError):  # beyond the package: would also fail at run time
            base = resolve_name("." * level + module, package)
            yield from (base, *(f"{base}.{each}" for each in imported))


@lru_cache(maxsize=4096)
def _facts(file: Path, mtime_ns: int) -> dict[str, Any]:
    def read(source: bytes) -> dict[str, Any]:
        tree = parse(source, file)
        return {"hash": tree_hash(tree), "imports": list(_import_statements(tree))}

    return facts_of(file.read_bytes(), read, VERSION)


def _import_statements(tree: ast.Module) -> Iterator[list[Any]]:
    """Level, module and imported names of every import statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ([0, alias.name, []] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield [node.level, node.module or "", [alias.name for alias in node.names]]


def tree_hash(tree: ast.Module) -> str:
    """A hash of what the code does: the same for any comment, docstring or layout."""
    return hashlib.sha256("".join(_canonical(tree)).encode()).hexdigest()


def _canonical(node: object) -> Iterator[str]:
    """The tree as text, without empty fields, since newer Python versions add fields."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field in sorted({*node._fields} - IGNORED_FIELDS):
            value = getattr(node, field, None)
            if field == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, False):
                value = node.body[1:]
            if value is not None and value != []:
                yield f" {field}="
                yield from _canonical(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _canonical(item)
            yield ","
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r}"
