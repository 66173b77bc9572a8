"""A result that holds nothing of what the page reads is named, in every chapter and topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
LACKS = "which is read now; made by other code or changed by hand"
Change = Callable[[dict[str, Any]], None]


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
def changed(path: Path, change: Change) -> Iterator[None]:
    """A result that the schema still allows, for as long as it is looked at."""
    whole = path.read_text()
    values = json.loads(whole)
    change(values)
    path.write_text(json.dumps(values))
    try:
        yield
    finally:
        path.write_text(whole)


def names_it(point: Point, change: Change, results: Path, folder: Path) -> str:
    """Build the page with one result changed; why that one, and no other, is unreadable."""
    out = folder / "chapters" / f"{point.chapter}.json"
    path = point.path(results, MACHINE)
    with changed(path, change):
        build(
            CONFIG, point.chapter, machine=MACHINE, device="cuda", results=results,
            figures=folder / "figures", out=out,
        )  # fmt: skip
    write_page([out], templates=TEMPLATES, out=folder / "writeup.md")
    assert LACKS in (folder / "writeup.md").read_text()
    problems = json.loads(out.read_text())["not_ok"]
    (unreadable,) = [problem for problem in problems if problem["status"] == "unreadable"]
    assert path.as_posix().endswith(unreadable["path"])
    return str(unreadable["reason"])


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds each, and a figure is the same without an unreadable point."""
    monkeypatch.setattr(building, "save", lambda drawing, folder, name: [])


@pytest.mark.parametrize(("point", "key"), list(cases()))
def test_without_data_or_times_the_page_comes_and_names_the_result(
    point: Point, key: str, results: Path, tmp_path: Path
) -> None:
    def emptied(values: dict[str, Any]) -> None:
        values[key] = {}

    assert LACKS in names_it(point, emptied, results, tmp_path)


@pytest.mark.parametrize(
    ("chapter", "topic", "keys"),
    [
        ("memory", "timeline", ("modes", "train_step", "replayed_bytes")),
        ("memory", "timeline", ("modes", "train_step", "stream")),
        ("memory", "timeline", ("modes", "train_step", "max_memory_allocated_bytes")),
        ("memory", "checkpointing", ("best_predicted",)),
        ("memory", "checkpointing", ("num_layers",)),
        ("precision", "accumulation", ("fp16_trace", "step")),
        ("precision", "layernorm", ("rows", 0, "scale")),
        ("precision", "layernorm", ("layernorm_rows", 0, "scale")),
        ("attention", "naive", ("arms", "compiled", "first_call_s")),
        ("attention", "model_compile", ("arms", "compiled", "first_step_s")),
        ("attention", "leaderboard", ("flops", "both")),
        ("sharded_optimizer", "only", ("memory", "arms", "replicated")),
    ],
)
def test_without_one_key_the_page_comes_and_names_it(
    chapter: str, topic: str, keys: tuple[str | int, ...], results: Path, tmp_path: Path
) -> None:
    *way, last = keys

    def without_it(values: dict[str, Any]) -> None:
        place: Any = values["data"]
        for key in way:
            place = place[key]
        del place[last]

    reason = names_it(first_ok_of_each_topic(chapter)[topic], without_it, results, tmp_path)
    assert f"has no {last!r}, {LACKS}" in reason
