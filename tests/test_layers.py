"""Packages depend only on lower layers, and planning and rendering do not import torch."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lmlab.jobs.registry import EXCLUDED_FROM_FINGERPRINT
from lmlab.study.files import ROOT

SOURCE = ROOT / "src" / "lmlab"
LIBRARY = {"kernels", "attention", "model", "parallel", "planning"}
# The packages that each package may import, besides itself and modules at the root.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "attention": {"kernels"},
    "model": {"attention"},
    "parallel": {"model"},
    "planning": set(),
    "measure": set(),
    "study": set(),
    "jobs": {*LIBRARY, "measure", "study"},
    "chapters": {*LIBRARY, "measure", "study", "jobs"},
    "report": {"study"},
    "result_sets": {"study", "report"},
    "cli": {*LIBRARY, "measure", "study", "jobs", "report", "result_sets", "chapters"},
}
# Some files have their own rules.
FILES = {
    "kernels/tune.py": {"kernels", "measure"},
    "chapters/*/grid.py": {"study"},
    "chapters/*page.py": {"report", "study", "planning", "chapters"},
}
# `jobs.catalog` finds chapters by listing the package and imports their grids by name.
EXCEPTIONS = {("jobs/catalog.py", "lmlab.chapters")}
WITHOUT_TORCH = [
    *("lmlab", "lmlab.attention", "lmlab.attention.registry", "lmlab.attention.support"),
    *("lmlab.cli", "lmlab.jobs.catalog", "lmlab.jobs.launch", "lmlab.jobs.staleness"),
    *("lmlab.measure.identity", "lmlab.measure.statistics", "lmlab.measure.warm_start"),
    *("lmlab.model.checkpoint_peak", "lmlab.model.cost", "lmlab.model.footprint"),
    *("lmlab.model.loading", "lmlab.parallel", "lmlab.planning.batch", "lmlab.planning.memory"),
    *("lmlab.planning.rings", "lmlab.study.results", "snakemake_logger_plugin_lmlab"),
]
PAGE, GRID = "chapters/*/page.py", "chapters/*/grid.py"
PYTHON = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
MODULES = {
    file: ".".join(("lmlab", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    for file in PYTHON
}


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


def allowed_for(file: str) -> set[str]:
    package = file.partition("/")[0]
    own = [allowed for pattern, allowed in FILES.items() if fnmatchcase(file, pattern)]
    return own[0] if own else {package, *MAY_IMPORT[package]}


@pytest.mark.parametrize("package", sorted({file.parent.name for file in SOURCE.glob("*/*.py")}))
def test_imports_point_down(package: str) -> None:
    for file in (file for file in PYTHON if file.startswith(f"{package}/")):
        parts = [name.split(".") for name in imported_modules(file)]
        ours = {part[1] for part in parts if part[0] == "lmlab" and len(part) > 1}
        assert ours & MAY_IMPORT.keys() <= allowed_for(file), file


def test_pages_import_no_measuring_code_of_chapters() -> None:
    for file in (file for file in PYTHON if fnmatchcase(file, PAGE)):
        named = {name for name in imported_modules(file) if name.startswith("lmlab.chapters.")}
        assert not {name for name in named if "measure" in name.split(".")}, file


def test_packages_of_chapters_are_empty() -> None:
    """They are imported with every module of the chapter, and count in its fingerprint."""
    for file in ("chapters/__init__.py", *(SOURCE / "chapters").glob("*/__init__.py")):
        assert (SOURCE / file).read_text() == ""


def test_planning_and_rendering_need_no_torch() -> None:
    patterns = ("report/*.py", GRID, PAGE)
    files = [file for file in PYTHON if any(fnmatchcase(file, pattern) for pattern in patterns)]
    modules = ", ".join([*WITHOUT_TORCH, *(MODULES[file] for file in files)])
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_measuring_needs_no_library_of_the_report() -> None:
    """scipy and vl_convert belong to the report, to pages and to comparisons."""
    for file in PYTHON:
        if not file.startswith(("report/", "result_sets/")) and not file.endswith("page.py"):
            tops = {name.partition(".")[0] for name in imported_modules(file)}
            assert tops.isdisjoint({"scipy", "vl_convert"}), file


@pytest.mark.parametrize("pattern", EXCLUDED_FROM_FINGERPRINT)
def test_every_module_that_no_fingerprint_counts_exists(pattern: str) -> None:
    assert any(fnmatchcase(module, pattern) for module in MODULES.values())
