"""A point's fingerprint follows the code that the point runs, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lmlab.import_path import ImportPathError
from lmlab.jobs.catalog import all_points, chapters
from lmlab.jobs.registry import code_modules, fingerprint, load
from lmlab.study.config import load as load_study
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import UnknownModule
from lmlab.study.points import Point
from tests.chapters.attention.points import benchmark_point, naive_point
from tests.jobs.points import end_to_end_point, precision_point, profile_point

Edit = Callable[[Path], None]

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


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources with a model of the user's own, found first because we stand in it."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "src" / "lmlab", folder / "lmlab")
    (folder / "mine.py").write_text("class Model: ...\n")
    monkeypatch.chdir(folder)
    return folder


def append(file: str, text: str) -> Edit:
    def edit(tree: Path) -> None:
        path = tree / file
        path.write_text((path.read_text() if path.exists() else "") + text)

    return edit


CODE = "\nADDED = 1\n"
EDITS: dict[str, tuple[Edit, set[str]]] = {
    "the attention variant": (
        append("lmlab/attention/naive.py", CODE),
        {"end_to_end", "own_model", "profile", "naive_attention", "benchmark"},
    ),
    "the list of attention variants": (append("lmlab/attention/registry.py", CODE), set()),
    "the names a package exports": (append("lmlab/attention/__init__.py", CODE), set()),
    "the version number": (append("lmlab/__init__.py", CODE), set()),
    "how results are written": (append("lmlab/study/results.py", CODE), set()),
    "an attention variant that no point names": (append("lmlab/attention/other.py", CODE), set()),
    "the model": (append("lmlab/model/transformer.py", CODE), {"end_to_end", "profile"}),
    "the optimizer": (
        append("lmlab/model/adamw.py", CODE),
        {"end_to_end", "own_model", "profile"},
    ),
    "how a trace is read": (append("lmlab/measure/trace/families.py", CODE), {"profile"}),
    "how nsys's export is read": (append("lmlab/measure/trace/nsys.py", CODE), {"profile"}),
    "the user's model": (append("mine.py", CODE), {"own_model"}),
    "the ceilings": (append("lmlab/measure/ceilings.py", CODE), {"machine"}),
    "the stated peaks": (append("lmlab/measure/peaks.yaml", "\n- names: [Test]\n"), {"machine"}),
    "the clock": (
        append("lmlab/measure/clock.py", CODE),
        {*POINTS} - {"precision"},
    ),
    "a variant that is one of several": (
        append("lmlab/attention/tiled.py", CODE),
        {"benchmark"},
    ),
    "one topic of a chapter": (
        append("lmlab/chapters/attention/measure/benchmark.py", CODE),
        {"benchmark"},
    ),
    "another topic of a chapter": (
        append("lmlab/chapters/attention/measure/leaderboard.py", CODE),
        set(),
    ),
    "what the topics of a chapter share": (
        append("lmlab/chapters/attention/measure/rounds.py", CODE),
        {"naive_attention", "benchmark"},
    ),
    "the runner of ranks": (append("lmlab/jobs/ranks.py", CODE), {"collectives"}),
    "the launcher of ranks": (append("lmlab/jobs/launch.py", CODE), set()),
    "the exchange of tensors": (append("lmlab/parallel/collectives.py", CODE), {"collectives"}),
    "the runner": (append("lmlab/jobs/run.py", CODE), set(POINTS)),
    "another chapter": (append("lmlab/chapters/memory/measure/__init__.py", CODE), set()),
    "a comment": (append("lmlab/jobs/run.py", "\n# a comment\n"), set()),
    "the grid of points": (append("lmlab/chapters/end_to_end/grid.py", CODE), set()),
    "a page": (append("lmlab/chapters/end_to_end/page.py", CODE), set()),
    "the time budget": (append("lmlab/jobs/budget.py", CODE), set()),
    "the command line": (append("lmlab/cli/__init__.py", CODE), set()),
}


@pytest.mark.parametrize(("edit", "stale"), EDITS.values(), ids=EDITS)
def test_an_edit_makes_stale_what_runs_it(tree: Path, edit: Edit, stale: set[str]) -> None:
    before = {name: fingerprint(point) for name, point in POINTS.items()}
    edit(tree)
    after = {name: fingerprint(point) for name, point in POINTS.items()}
    assert {name for name in POINTS if before[name] != after[name]} == stale


def test_every_chapter_of_the_study_has_a_module_that_measures_it() -> None:
    for chapter in chapters():
        assert callable(load(chapter))


def test_every_point_of_every_study_has_a_fingerprint() -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    for name in config["studies"]:
        for point in all_points(load_study({**config, "study": name}, "cpu")):
            assert len(fingerprint(point)) == 16


def test_a_point_starts_from_its_chapter_its_variant_and_its_model() -> None:
    assert code_modules(end_to_end_point(model="mine:Model")) == [
        "lmlab.jobs.run",
        "lmlab.chapters.end_to_end.measure",
        "lmlab.attention.naive",
        "mine",
    ]


def test_a_model_that_is_nowhere_is_named_in_one_line() -> None:
    with pytest.raises(UnknownModule, match="'nowhere' is not on the Python path"):
        fingerprint(end_to_end_point(model="nowhere:Model"))


def test_a_chapter_without_a_module_is_named_in_one_line() -> None:
    with pytest.raises(ImportPathError, match=r"lmlab\.chapters\.gardening"):
        load("gardening")
