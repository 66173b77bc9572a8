"""The points of the chapters that train on several ranks."""

from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import Study, load
from lmlab.study.files import ROOT

CHAPTERS = ("data_parallel", "sharded_optimizer", "fsdp")


def study(name: str, **changes: Any) -> Study:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    return load({**config, "study": name, **changes}, "cpu")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_point_for_each_placement_and_world(chapter: str) -> None:
    points = points_of(study("full"), chapter)
    worlds = [(p.parameters["placement"], p.parameters["world_size"]) for p in points]
    assert worlds == [*(("own_gpu", n) for n in (2, 4, 6, 8)), ("shared_gpu", 2)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_size_comes_with_its_shape_the_largest_first(chapter: str) -> None:
    point = points_of(study("full"), chapter)[0]
    sizes = point.settings["sizes"]
    assert [size["size"] for size in sizes] == ["xl", "large", "medium", "small"]
    assert sizes[0] == {
        "size": "xl", "d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25
    }  # fmt: skip
    assert point.settings["vocab_size"] == 10000
    assert "d_model" not in point.settings


def test_the_torch_bucket_has_one_of_ours_of_the_same_size() -> None:
    for name in ("full", "tiny", "nano"):
        settings = points_of(study(name), "data_parallel")[0].settings
        assert settings["torch_bucket_mb"] in settings["bucket_sizes_mb"]
