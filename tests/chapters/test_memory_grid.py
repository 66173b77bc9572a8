"""The memory chapter's points: largest size first, and checkpointing as one point of variants."""

from __future__ import annotations

from itertools import product
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


def test_the_grid_is_every_size_context_and_precision(config: Config) -> None:
    points = points_of(load(config, "cuda"), "memory")
    *grid, checkpointing = [point.parameters for point in points]
    block = config["studies"]["full"]["memory"]
    axes = ("sizes", "contexts", "precisions")
    found = [tuple(p[axis.removesuffix("s")] for axis in axes) for p in grid]
    assert found == list(product(*(block[axis] for axis in axes)))
    assert {p["topic"] for p in grid} == {"timeline"}
    assert checkpointing["topic"] == "checkpointing"


def test_every_checkpointed_segment_divides_the_blocks(config: Config) -> None:
    for device in ("cuda", "cpu"):
        point = points_of(load(config, device), "memory")[-1]
        names = point.settings["strategies"].split(",")
        lengths = [int(name.removeprefix("every-")) for name in names if name.startswith("every-")]
        assert [k for k in lengths if point.settings["num_layers"] % k] == []


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("strategies", ["every-0"], "none, nested, or every-K"),
        ("size", "huge", r"memory\.checkpointing\.size names 'huge'; allowed"),
    ],
)
def test_what_does_not_exist_stops_the_study(
    config: Config, key: str, given: Any, message: str
) -> None:
    config["studies"]["nano"]["memory"]["checkpointing"][key] = given
    with pytest.raises(ConfigError, match=message):
        load(config, "cpu")
