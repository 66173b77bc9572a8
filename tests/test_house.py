"""The plan of the house holds: arrows run downward, and the torch-free floors import no torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from lmlab.study.files import ROOT

SOURCE = ROOT / "src" / "lmlab"

# What each room may import of the others; a room may always import itself.
MAY_IMPORT = {
    "kernels": set(),
    "attention": {"kernels"},
    "model": {"attention"},
    "parallel": {"model"},
    "measure": set(),
    "study": set(),
    "planning": set(),
    "experiments": {"kernels", "attention", "model", "parallel", "measure", "study", "planning"},
    "writeup": {"study", "planning"},
}
FOUNDATION = {"import_path"}  # a module at the root that every room may use
WITHOUT_TORCH = [
    "lmlab",
    "lmlab.attention",
    "lmlab.attention.registry",
    "lmlab.attention.support",
    "lmlab.jobs.launch",
    "lmlab.jobs.registry",
    "lmlab.measure.identity",
    "lmlab.measure.statistics",
    "lmlab.measure.warm_start",
    "lmlab.model.cost",
    "lmlab.parallel",
    "lmlab.planning.batch",
    "lmlab.planning.memory",
    "lmlab.planning.rings",
    "lmlab.jobs.catalog",
    "lmlab.study.results",
    "lmlab.writeup.build",
    "lmlab.writeup.page",
    "snakemake_logger_plugin_lmlab",
]


def rooms_imported(room: str) -> dict[str, set[str]]:
    """File to the other rooms that its import statements name."""
    found: dict[str, set[str]] = {}
    for file in (SOURCE / room).rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "lmlab":
                names |= {f"lmlab.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
        rooms = {name.split(".")[1] for name in names if name.startswith("lmlab.")}
        found[str(file.relative_to(ROOT))] = rooms - {room} - FOUNDATION
    return found


def test_every_room_has_its_floor() -> None:
    rooms = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert rooms - {"cli"} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_downward(room: str) -> None:
    wrong = {
        file: sorted(rooms - MAY_IMPORT[room])
        for file, rooms in rooms_imported(room).items()
        if rooms - MAY_IMPORT[room]
    }
    assert wrong == {}


def test_parsing_and_rendering_need_no_torch() -> None:
    program = f"import sys, {', '.join(WITHOUT_TORCH)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
