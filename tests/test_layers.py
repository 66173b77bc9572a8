"""Dependencies between packages point down only, and what plans or renders imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lmlab.jobs.registry import EXCLUDED_FROM_FINGERPRINT
from lmlab.study.files import ROOT

SOURCE = ROOT / "src" / "lmlab"
LIBRARY = {"kernels", "attention", "model", "parallel", "planning"}
# What each package may import of the others, besides itself and modules at the root.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "attention": {"kernels"},
    "model": {"attention", "kernels"},
    "parallel": {"model", "attention", "kernels"},
    "planning": set(),
    "measure": set(),
    "study": set(),
    "jobs": {*LIBRARY, "measure", "study"},
    "chapters": {*LIBRARY, "measure", "study", "jobs"},
    "report": {"study", "planning"},
    "comparison": {"study", "report"},
    "cli": {*LIBRARY, "measure", "study", "jobs", "report", "comparison", "chapters"},
}
# Single files of a chapter have rules of their own.
FILES = {
    "chapters/*/grid.py": {"study"},
    "chapters/*page.py": {"report", "study", "planning", "chapters"},
}
# `jobs.catalog` finds chapters by listing the package and imports their grids by name.
EXCEPTIONS = {("jobs/catalog.py", "lmlab.chapters")}
WITHOUT_TORCH = [
    *("lmlab", "lmlab.attention", "lmlab.attention.registry", "lmlab.attention.support"),
    *("lmlab.cli", "lmlab.jobs.catalog", "lmlab.jobs.launch", "lmlab.jobs.staleness"),
    *("lmlab.measure.identity", "lmlab.measure.statistics", "lmlab.measure.warm_start"),
    *("lmlab.model.cost", "lmlab.parallel", "lmlab.planning.batch", "lmlab.planning.memory"),
    *("lmlab.planning.rings", "lmlab.study.results", "snakemake_logger_plugin_lmlab"),
]
PYTHON = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def imported_modules(file: str) -> set[str]:
    """Every module that a file's import statements name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from lmlab import x` and `from lmlab.jobs import x` name modules too.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if (file, name) not in EXCEPTIONS}


def packages_imported(file: str) -> set[str]:
    """The packages of ours that a file imports."""
    parts = (name.split(".") for name in imported_modules(file))
    return {part[1] for part in parts if part[0] == "lmlab" and len(part) > 1} & MAY_IMPORT.keys()


def allowed_for(file: str) -> set[str]:
    package = file.partition("/")[0]
    for pattern, allowed in FILES.items():
        if fnmatchcase(file, pattern):
            return allowed
    return {package, *MAY_IMPORT[package]}


def test_every_package_has_its_rules() -> None:
    packages = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert packages <= set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down(package: str) -> None:
    files = [file for file in PYTHON if file.startswith(f"{package}/")]
    wrong = {file: packages_imported(file) - allowed_for(file) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_pages_import_no_other_code_of_chapters_than_pages_and_grids() -> None:
    for file in PYTHON:
        if fnmatchcase(file, "chapters/*/page.py"):
            named = {name for name in imported_modules(file) if name.startswith("lmlab.chapters.")}
            assert not {name for name in named if "measure" in name.split(".")}


def test_packages_of_chapters_are_empty() -> None:
    """They are imported with every module of the chapter, and count in its fingerprint."""
    for file in ("chapters/__init__.py", *(SOURCE / "chapters").glob("*/__init__.py")):
        assert (SOURCE / file).read_text() == ""


def without_torch() -> Iterator[str]:
    yield from WITHOUT_TORCH
    patterns = ("report/*.py", "chapters/*/grid.py", "chapters/*/page.py")
    for file in PYTHON:
        if any(fnmatchcase(file, pattern) for pattern in patterns):
            module = ".".join(("lmlab", *Path(file).with_suffix("").parts))
            yield module.removesuffix(".__init__")


def test_planning_and_rendering_need_no_torch() -> None:
    program = f"import sys, {', '.join(without_torch())}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_measuring_needs_no_library_of_the_report() -> None:
    """scipy and vl_convert belong to the report and to pages."""
    for file in PYTHON:
        if not file.startswith("report/") and not file.endswith("page.py"):
            tops = {name.partition(".")[0] for name in imported_modules(file)}
            assert tops.isdisjoint({"scipy", "vl_convert"}), file


@pytest.mark.parametrize("pattern", EXCLUDED_FROM_FINGERPRINT)
def test_every_module_that_no_fingerprint_counts_exists(pattern: str) -> None:
    modules = {
        ".".join(("lmlab", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
        for file in PYTHON
    }
    assert any(fnmatchcase(module, pattern) for module in modules)
