"""The attention chapter's grid: every shape of the study once, compiled where it may take time."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT
from lmlab.study.points import Point

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())


def points(study: str, **changes: Any) -> list[Point]:
    config = copy.deepcopy({**CONFIG, "study": study})
    config["studies"][study]["attention"].update(changes)
    return points_of(load(config, "cpu"), "attention")


def of(topic: str, found: list[Point]) -> list[Point]:
    return [point for point in found if point.parameters["topic"] == topic]


def test_the_full_study_has_every_shape() -> None:
    counts = Counter(point.parameters["topic"] for point in points("full"))
    assert counts == {
        "naive": 4 * 5 + 1,
        "model_compile": 5,
        "benchmark": 10 * 4 * 2,
        "tiles": 2,
        "leaderboard": 2,
        "model": 5 * 4,
    }


@pytest.mark.parametrize("study", ["full", "tiny", "nano"])
def test_every_point_has_a_path_of_its_own(study: str, tmp_path: Any) -> None:
    paths = [point.path(tmp_path, "m") for point in points(study)]
    assert len(set(paths)) == len(paths)


def test_variants_that_compile_take_part_where_the_study_says() -> None:
    block = CONFIG["studies"]["full"]["attention"]["benchmark"]
    for point in of("benchmark", points("full")):
        compiles = (
            point.parameters["sequence"] in block["compile"]["sequences"]
            and point.parameters["head_dim"] in block["compile"]["head_dims"]
        )
        assert ("flex" in point.settings["variants"]) == compiles
        assert ("compiled" in point.settings["variants"]) == compiles
        assert "flash" in point.settings["variants"]


def test_the_leaderboard_is_the_published_shape() -> None:
    board = of("leaderboard", points("full"))[0]
    asked = {**board.settings, **board.parameters}
    shape = {key: asked[key] for key in ("batch", "heads", "sequence", "head_dim", "precision")}
    assert shape == {
        "batch": 1,
        "heads": 16,
        "sequence": 16384,
        "head_dim": 64,
        "precision": "bf16",
    }


def test_tiles_name_the_variant_whose_code_they_run() -> None:
    for point in of("tiles", points("full")):
        assert point.settings["attention"] == "flash"
        assert [128, 64] in point.settings["tiles"]


def test_a_topic_that_is_not_named_has_no_points() -> None:
    assert {p.parameters["topic"] for p in points("full", topics=["tiles"])} == {"tiles"}


def test_the_model_is_raced_at_all_contexts() -> None:
    found = of("model", points("full"))
    assert {p.parameters["context"] for p in found} == {128, 256, 512, 1024}
    assert all(p.settings["variants"] == ["naive", "flash"] for p in found)


def test_an_unknown_size_or_topic_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"attention.sizes names 'huge'"):
        points("full", sizes=["huge"])
    with pytest.raises(ConfigError, match=r"attention.topics.0 = \"magic\"; allowed: naive"):
        points("full", topics=["magic"])
