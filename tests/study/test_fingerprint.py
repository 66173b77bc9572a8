"""The fingerprint changes with what the code does, and with nothing else."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.study import fingerprint
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint, import_closure, tree_hash

PLAIN = "def double(x):\n    return 2 * x\n"
# Another text, and whether it does the same.
TEXTS = {
    "module docstring": ('"""Says why."""\n' + PLAIN, True),
    "function docstring": ('def double(x):\n    "Twice."\n    return 2 * x\n', True),
    "comments": ("# why\n" + PLAIN.replace("x\n", "x  # twice\n"), True),
    "layout": ("def double(x):\n\n    return (2\n        * x)\n", True),
    "a number": (PLAIN.replace("2", "3"), False),
    "a number's type": (PLAIN.replace("2", "2.0"), False),
    "a string for a number": (PLAIN.replace("2", "'2'"), False),
    "an operator": (PLAIN.replace("*", "+"), False),
    "a default": (PLAIN.replace("(x)", "(x=None)"), False),
    "a statement": (PLAIN + "double(1)\n", False),
}


@pytest.mark.parametrize(("text", "same"), TEXTS.values(), ids=TEXTS)
def test_a_hash_changes_with_what_the_code_does(text: str, same: bool) -> None:
    assert (tree_hash(ast.parse(text)) == tree_hash(ast.parse(PLAIN))) is same


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with an import inside a function, a relative one, and one that nothing imports."""
    files = {
        "lab/__init__.py": "",
        "lab/run.py": "from lab.inner import tool\n\ndef go():\n    import lab.lazy\n",
        "lab/inner/__init__.py": "BASE = 1\n",
        "lab/inner/tool.py": "from . import sibling\nfrom ..deep import thing\nimport json\n",
        "lab/inner/sibling.py": "x = 1\n",
        "lab/deep.py": "thing = 1\n",
        "lab/lazy.py": "y = 1\n",
        "lab/unused.py": "z = 1\n",
    }
    root = tmp_path / "original"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_closure_follows_every_import_and_no_others(package: Path) -> None:
    closure = import_closure(["lab.run"], [str(package)])
    inner = {"lab.inner", "lab.inner.sibling", "lab.inner.tool"}
    assert set(closure) == {"lab", "lab.deep", "lab.lazy", "lab.run", *inner}


def test_a_file_next_to_a_users_module_counts(package: Path) -> None:
    (package / "mine.py").write_text("from parts import block\nimport json\n")
    (package / "parts.py").write_text("block = 1\n")
    assert sorted(import_closure(["mine"], [str(package)])) == ["mine", "parts"]


def test_an_excluded_module_is_followed_but_does_not_count(package: Path) -> None:
    def fingerprint() -> str:
        return code_fingerprint(["lab.run"], [str(package)], excluded=["lab.inner.*"])

    before = fingerprint()
    (package / "lab/inner/sibling.py").write_text("x = 22\n")
    assert fingerprint() == before
    (package / "lab/deep.py").write_text("thing = 22\n")
    assert fingerprint() != before


@pytest.mark.parametrize(("text", "changes"), [("a: 2\n", True), ("# why\na: 1\n", False)])
def test_a_yaml_file_of_a_modules_name_is_its_data(package: Path, text: str, changes: bool) -> None:
    (package / "lab/deep.yaml").write_text("a: 1\n")
    before = code_fingerprint(["lab.run"], [str(package)])
    (package / "lab/deep.yaml").write_text(text)
    assert (code_fingerprint(["lab.run"], [str(package)]) != before) is changes


def test_another_python_version_gives_the_same_hash() -> None:
    """A result from Python 3.12 must be recognised on 3.11, whose syntax tree has fewer fields."""
    other = next(filter(None, map(_python, ("3.12", "3.13", "3.11"))), None)
    if other is None:
        pytest.skip("no second Python version on this machine")
    script = "from lmlab.study import fingerprint as f\nprint(f.tree_hash(f.ast.parse({!r})))"
    text = Path(fingerprint.__file__).read_text()
    theirs = subprocess.run(
        [other, "-c", script.format(text)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert theirs.stdout.strip() == tree_hash(ast.parse(text))


def _python(version: str) -> str | None:
    """A working interpreter of a version other than the one that runs now."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return None
    siblings = Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")
    return next(map(str, siblings), None) or shutil.which(f"python{version}")
