"""A result that holds nothing of what the page reads is named, in every chapter and topic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.chapters import points_of
from lmlab.study.config import load
from lmlab.study.files import TEMPLATES
from lmlab.study.points import Point
from lmlab.writeup import build as building
from lmlab.writeup.build import build
from lmlab.writeup.page import write_page
from tests.writeup import factory, synthetic

MACHINE = "nvidia-h200"


def smallest_config() -> dict[str, Any]:
    """The full study with a point or two of each topic."""
    values = factory.config(study="full")
    blocks = values["studies"]["full"]
    few: dict[str, Any] = {"sizes": ["small"], "contexts": [128, 256]}
    blocks["end_to_end"].update(few, modes=["train_step"])
    blocks["profile"].update(few)
    blocks["memory"].update(few)
    blocks["attention"].update(sizes=["small"])
    for topic in ("naive", "benchmark"):
        blocks["attention"][topic].update(head_dims=[64], sequences=[1024, 16384])
    return values


CONFIG = smallest_config()
STUDY = load(CONFIG, "cuda")


def first_ok_of_each_topic(chapter: str) -> dict[str, Point]:
    """One measured point of every topic; of a chapter without topics, one for each start."""
    found: dict[str, Point] = {}
    for point in points_of(STUDY, chapter):
        if synthetic.MAKERS[chapter](point, "cuda").status == "ok":
            asked = point.parameters
            found.setdefault(str(asked.get("topic") or asked.get("start") or "only"), point)
    return found


def cases() -> Iterator[Any]:
    """Each topic without its data, and without its measurements where it has any."""
    for chapter, make in synthetic.MAKERS.items():
        for topic, point in first_ok_of_each_topic(chapter).items():
            for key in ("data", "measurements"):
                if getattr(make(point, "cuda"), key):
                    yield pytest.param(point, key, id=f"{chapter}-{topic}-{key}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every result of the study, as it should be."""
    folder = tmp_path_factory.mktemp("study") / "results"
    for chapter, make in synthetic.MAKERS.items():
        for point in points_of(STUDY, chapter):
            make(point, "cuda").write(point.path(folder, MACHINE))
    return folder


@contextmanager
def emptied(path: Path, key: str) -> Iterator[None]:
    """A result that the schema still allows, for as long as it is looked at."""
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), key: {}}))
    try:
        yield
    finally:
        path.write_text(whole)


@pytest.mark.parametrize(("point", "key"), list(cases()))
def test_the_page_comes_and_names_the_result(
    point: Point, key: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "save", lambda drawing, folder, name: [])  # seconds each
    out = tmp_path / "chapters" / f"{point.chapter}.json"
    path = point.path(results, MACHINE)
    with emptied(path, key):
        build(
            CONFIG, point.chapter, machine=MACHINE, device="cuda", results=results,
            figures=tmp_path / "figures", out=out,
        )  # fmt: skip
    write_page([out], templates=TEMPLATES, out=tmp_path / "writeup.md")
    problems = json.loads(out.read_text())["not_ok"]
    (unreadable,) = [problem for problem in problems if problem["status"] == "unreadable"]
    assert path.as_posix().endswith(unreadable["path"])
    assert "which is read now; made by other code or changed by hand" in unreadable["reason"]
    assert "which is read now" in (tmp_path / "writeup.md").read_text()
