"""The memory chapter's points: largest size first, and checkpointing as one point of many arms."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    content: Config = yaml.safe_load((ROOT / "config.yaml").read_text())
    return content


def test_the_full_study_is_the_one_promised(config: Config) -> None:
    points = points_of(load(config, "cuda"), "memory")
    grid = [p.parameters for p in points if p.parameters["topic"] == "timeline"]
    assert len(grid) == 5 * 4 * 2
    assert grid[0]["size"] == "2.7b"
    assert {p["context"] for p in grid} == {128, 256, 512, 1024}
    assert {p["precision"] for p in grid} == {"fp32", "bf16"}
    (checkpointing,) = [p for p in points if p.parameters["topic"] == "checkpointing"]
    assert (checkpointing.parameters["size"], checkpointing.parameters["context"]) == ("xl", 2048)
    assert {"none", "every-1", "every-6", "nested"} <= set(
        checkpointing.settings["strategies"].split(",")
    )


def test_every_checkpointed_segment_divides_the_blocks(config: Config) -> None:
    for device in ("cuda", "cpu"):
        point = points_of(load(config, device), "memory")[-1]
        lengths = [
            int(name.removeprefix("every-"))
            for name in point.settings["strategies"].split(",")
            if name.startswith("every-")
        ]
        assert [k for k in lengths if point.settings["num_layers"] % k] == []


def test_a_strategy_that_does_not_exist_stops_the_study(config: Config) -> None:
    config["studies"]["nano"]["memory"]["checkpointing"]["strategies"] = ["every-0"]
    with pytest.raises(ConfigError, match="none, nested, or every-K"):
        load(config, "cpu")


def test_a_size_that_does_not_exist_stops_the_study(config: Config) -> None:
    config["studies"]["nano"]["memory"]["checkpointing"]["size"] = "huge"
    with pytest.raises(ConfigError, match=r"memory\.checkpointing\.size names 'huge'; allowed"):
        load(config, "cpu")
