"""A chapter's document comes whatever its results hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.chapters import points_of
from lmlab.study.config import load
from lmlab.study.points import Point
from lmlab.study.results import LacksKey, Result
from lmlab.writeup import build as building
from lmlab.writeup.build import build
from lmlab.writeup.registry import part
from tests.writeup import factory, synthetic

SMALL = {
    "sizes": ["small"],
    "contexts": [128, 256],
    "modes": ["train_step"],
    "precisions": ["fp32"],
}


def config() -> dict[str, Any]:
    values = factory.config(study="full")
    values["studies"]["full"]["end_to_end"].update(SMALL)
    values["studies"]["full"]["profile"].update(sizes=["small"], contexts=[128, 256])
    return values


def files_of(root: Path, chapter: str) -> dict[Path, Point]:
    """Results of a chapter's points, written as they should be."""
    found = {}
    for point in points_of(load(config(), "cuda"), chapter):
        path = point.path(root / "results", "nvidia-h200")
        synthetic.MAKERS[chapter](point, "cuda").write(path)
        found[path] = point
    return found


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def built(root: Path, chapter: str = "end_to_end") -> dict[str, Any]:
    out = root / "report" / "chapters" / f"{chapter}.json"
    build(
        config(), chapter, machine="nvidia-h200", device="cuda", results=root / "results",
        figures=root / "report" / "figures", out=out,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_results_without_what_the_page_reads_are_told_and_the_others_shown(tmp_path: Path) -> None:
    files_of(tmp_path, "machine")
    whole = [*files_of(tmp_path, "end_to_end")]
    for path in whole[:2]:
        change(path, lambda values: values["data"].clear())
    document = built(tmp_path)
    told = json.dumps(document)
    assert told.count("which is read now; made by other code or changed by hand") == 2
    assert str(tmp_path) not in told
    assert document["tables"]["times_fp32"]["rows"]


@pytest.mark.parametrize(
    ("chapter", "way", "missing"),
    [
        pytest.param("profile", ["modes"], "train_step", id="a mode"),
        pytest.param("profile", ["modes"], "forward", id="the first mode"),
        pytest.param("data_parallel", ["arms", "naive"], "ranks_ms", id="times of an arm"),
        pytest.param("fsdp", ["arms", "ddp"], "ranks_ms", id="times of what is compared with"),
    ],
)
def test_what_a_result_lacks_in_its_depth_is_found_out(
    tmp_path: Path, chapter: str, way: list[str], missing: str
) -> None:
    def take_out(values: dict[str, Any]) -> None:
        inner = values["data"]
        for key in way:
            inner = inner[key]
        del inner[missing]

    files_of(tmp_path, "machine")
    files_of(tmp_path, "end_to_end")
    measured = [file for file in files_of(tmp_path, chapter) if is_ok(file)]
    change(measured[0], take_out)
    assert f"has no '{missing}', which is read now" in json.dumps(built(tmp_path, chapter))


@pytest.mark.parametrize(
    ("chapter", "key", "value"),
    [
        ("end_to_end", "precision", "bf16"),
        ("memory", "precision", "bf16"),
        ("profile", "size", "xl"),
    ],
)
def test_tables_with_unsupported_cells_tell_the_reason_once(
    chapter: str, key: str, value: str
) -> None:
    def make(point: Point, device: str) -> Result:
        if point.parameters.get(key) == value:
            return factory.failed(point, "unsupported", "not here", device)
        return synthetic.MAKERS[chapter](point, device)

    made = part("tables", chapter)(synthetic.collected(chapter, make=make))
    made.pop("published", None)  # its caption is about the publications
    told = {name: table.caption.count("not here") for name, table in made.items()}
    unsupported = {
        name for name, table in made.items() if "unsupported" in json.dumps(table.to_json()["rows"])
    }
    assert unsupported
    assert {name for name in unsupported if told[name] != 1} == set()


def is_ok(file: Path) -> bool:
    return bool(json.loads(file.read_text())["status"] == "ok")


def test_a_reader_that_asks_again_for_what_was_refused_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(_: object) -> None:
        raise LacksKey(tmp_path / "result.json", "depth")

    monkeypatch.setattr(building, "document_of", stubborn)
    with pytest.raises(LacksKey, match="has no 'depth'"):
        built(tmp_path)
