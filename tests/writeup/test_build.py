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
from lmlab.study.results import LacksKey
from lmlab.writeup import build as building
from lmlab.writeup.build import build
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


def built(root: Path) -> dict[str, Any]:
    out = root / "report" / "chapters" / "end_to_end.json"
    build(
        config(), "end_to_end", machine="nvidia-h200", device="cuda", results=root / "results",
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


def test_a_reader_that_asks_again_for_what_was_refused_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(_: object) -> None:
        raise LacksKey(tmp_path / "result.json", "depth")

    monkeypatch.setattr(building, "document_of", stubborn)
    with pytest.raises(LacksKey, match="has no 'depth'"):
        built(tmp_path)
