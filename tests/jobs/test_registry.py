"""A point's fingerprint follows the code that the point runs, and no other."""

import contextlib
import shutil
from pathlib import Path

import pytest

from lmlab.import_path import ImportPathError, resolve
from lmlab.jobs.catalog import all_points, chapters
from lmlab.jobs.registry import fingerprint, fingerprint_of, load
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from tests.chapters.attention.points import benchmark_point, naive_point
from tests.jobs.points import end_to_end_point, precision_point, profile_point
from tests.project import config, study

POINTS = {
    "end_to_end": end_to_end_point(),
    "profile": profile_point(),
    "precision": precision_point("layernorm"),
    "machine": Point("machine", {}, {"quick": True, "seed": 0}),
    "own_model": end_to_end_point(model="mine:Model"),
    "collectives": Point("collectives", {"placement": "cpu", "world_size": 2}, {}),
    "naive_attention": naive_point("naive"),
    "benchmark": benchmark_point("naive", "tiled"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with a model of the user's own, as they are at the start."""
    folder = tmp_path_factory.mktemp("sources") / "tree"
    shutil.copytree(ROOT / "src" / "lmlab", folder / "lmlab")
    (folder / "mine.py").write_text("class Model: ...\n")
    return folder


def fingerprints(tree: Path) -> dict[str, str]:
    """Fingerprints of all points; the tree is found first because we stand in it."""
    fingerprint_of.cache_clear()
    with contextlib.chdir(tree):
        return {name: fingerprint(point) for name, point in POINTS.items()}


@pytest.fixture(scope="module")
def before(tree: Path) -> dict[str, str]:
    return fingerprints(tree)


CODE = "\nADDED = 1\n"
MODEL = {"end_to_end", "profile"}
ATTENTION = {"naive_attention", "benchmark"}
# File of the tree and what is appended to it: the points that become stale.
EDITS: dict[tuple[str, str], set[str]] = {
    ("lmlab/attention/naive.py", CODE): {*MODEL, "own_model", *ATTENTION},
    ("lmlab/attention/tiled.py", CODE): {"benchmark"},
    ("lmlab/model/transformer.py", CODE): MODEL,
    ("lmlab/model/adamw.py", CODE): {*MODEL, "own_model"},
    ("mine.py", CODE): {"own_model"},
    ("lmlab/measure/trace/kernel_names.py", CODE): {"profile"},
    ("lmlab/measure/trace/nsys.py", CODE): {"profile"},
    ("lmlab/measure/ceilings.py", CODE): {"machine"},
    ("lmlab/measure/peaks.yaml", "\n- names: [Test]\n"): {"machine"},
    ("lmlab/measure/clock.py", CODE): {*POINTS} - {"precision"},
    ("lmlab/chapters/attention/measure/benchmark.py", CODE): {"benchmark"},
    ("lmlab/chapters/attention/measure/rounds.py", CODE): ATTENTION,
    ("lmlab/parallel/collectives.py", CODE): {"collectives"},
    ("lmlab/jobs/ranks.py", CODE): {"collectives"},
    ("lmlab/jobs/run.py", CODE): set(POINTS),
    ("lmlab/jobs/run.py", "\n# a comment\n"): set(),
}
UNCOUNTED = (
    *("attention/registry.py", "attention/__init__.py", "__init__.py", "study/results.py"),
    *("measure/exclusive.py", "measure/warm_start/helper.py", "jobs/launch.py", "cli/__init__.py"),
    *("chapters/attention/measure/leaderboard.py", "chapters/memory/measure/__init__.py"),
    *("chapters/end_to_end/grid.py", "chapters/end_to_end/page.py"),
)
EDITS |= {(f"lmlab/{file}", CODE): set() for file in UNCOUNTED}


@pytest.mark.parametrize(("edit", "stale"), EDITS.items(), ids=[file for file, _ in EDITS])
def test_an_edit_makes_stale_what_runs_it(
    tree: Path, before: dict[str, str], edit: tuple[str, str], stale: set[str]
) -> None:
    path = tree / edit[0]
    original = path.read_text() if path.exists() else ""
    path.write_text(original + edit[1])
    after = fingerprints(tree)
    path.write_text(original)
    assert {name for name in POINTS if before[name] != after[name]} == stale


def test_the_code_of_every_point_of_every_study_exists() -> None:
    points = [point for name in config()["studies"] for point in all_points(study(name))]
    assert {point.chapter for point in points} == set(chapters())
    assert {len(fingerprint(point)) for point in points} == {16}


def test_code_that_is_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="'nowhere' is not on the Python path"):
        fingerprint(end_to_end_point(model="nowhere:Model"))
    with pytest.raises(ImportPathError, match=r"lmlab\.chapters\.gardening"):
        load("gardening")


def test_a_module_that_exits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportPathError, match=r"'script:Model' cannot be imported: it exits \(0\)"):
        resolve("script:Model")
