"""The memory chapter's points: largest size first, and checkpointing as points of variants."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT
from lmlab.study.points import Point

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    content: Config = yaml.safe_load((ROOT / "config.yaml").read_text())
    return content


def of_topic(config: Config, topic: str) -> list[Point]:
    points = points_of(load(config, "cuda"), "memory")
    return [point for point in points if point.parameters["topic"] == topic]


@pytest.mark.parametrize("topic", ["timeline", "long_context", "block", "checkpointing"])
def test_every_topic_has_a_grid_of_its_own(config: Config, topic: str) -> None:
    whole = config["studies"]["full"]["memory"]
    block = {**whole, **whole.get(topic, {})}
    if topic == "checkpointing":
        block["precisions"] = [block["precision"]]
    axes = ("sizes", "contexts", "precisions")
    points = [point.parameters for point in of_topic(config, topic)]
    found = [tuple(point[axis.removesuffix("s")] for axis in axes) for point in points]
    assert found == list(product(*(block[axis] for axis in axes)))
    assert {point["batch"] for point in points} == {1 if topic == "long_context" else 4}


def test_only_strategies_that_divide_the_blocks_are_asked_for(config: Config) -> None:
    config["studies"]["full"]["memory"]["checkpointing"]["strategies"] = ["none", "every-3"]
    asked = {
        point.parameters["size"]: point.settings["strategies"]
        for point in of_topic(config, "checkpointing")
    }
    assert asked == {"xl": "none,every-3", "2.7b": "none"}  # 48 and 32 blocks


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("strategies", ["every-0"], "none, nested, or every-K"),
        ("sizes", ["huge"], r"memory\.checkpointing\.sizes names 'huge'; allowed"),
    ],
)
def test_what_does_not_exist_stops_the_study(
    config: Config, key: str, given: Any, message: str
) -> None:
    config["studies"]["nano"]["memory"]["checkpointing"][key] = given
    with pytest.raises(ConfigError, match=message):
        load(config, "cpu")
