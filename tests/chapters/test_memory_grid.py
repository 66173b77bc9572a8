"""Points of the memory and profile chapters: one per size, context and precision of each topic."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT
from lmlab.study.points import Point

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
AXES = ("sizes", "contexts", "precisions")


def points(chapter: str, part: str | None = None, **changes: Any) -> list[Point]:
    """The full study's points with other keys in the chapter's block, or in a part of it."""
    config = deepcopy(CONFIG) | {"study": "full"}
    block = config["studies"]["full"][chapter]
    (block[part] if part else block).update(changes)
    return points_of(load(config, "cuda"), chapter)


@pytest.mark.parametrize(
    ("chapter", "topic", "batch"),
    [
        ("profile", None, 4),
        ("memory", "timeline", 4),
        ("memory", "long_context", 1),
        ("memory", "block", 4),
        ("memory", "checkpointing", 4),
    ],
)
def test_every_topic_has_a_grid_of_its_own(chapter: str, topic: str | None, batch: int) -> None:
    whole = CONFIG["studies"]["full"][chapter]
    block = {**whole, **whole.get(topic, {})}
    precisions = [block["precision"]] if "precision" in block else block["precisions"]
    asked = [p.parameters for p in points(chapter) if p.parameters.get("topic") == topic]
    found = [tuple(point[axis.removesuffix("s")] for axis in AXES) for point in asked]
    assert found == list(product(block["sizes"], block["contexts"], precisions))
    assert {point["batch"] for point in asked} == {batch}


def test_only_strategies_that_divide_the_blocks_are_asked_for() -> None:
    asked = {
        point.parameters["size"]: point.settings["strategies"]
        for point in points("memory", "checkpointing", strategies=["none", "every-3"])
        if point.parameters["topic"] == "checkpointing"
    }
    assert asked == {"xl": "none,every-3", "2.7b": "none"}  # 48 and 32 blocks


@pytest.mark.parametrize("changes", [{"profiler": "torch"}, {"nsys_options": ["--stats=true"]}])
def test_another_tool_replaces_a_result_instead_of_adding_one(changes: dict[str, Any]) -> None:
    first, other = (points("profile", **each)[0].path(Path("r"), "m") for each in ({}, changes))
    assert first == other


@pytest.mark.parametrize(
    ("chapter", "part", "key", "wrong"),
    [
        ("memory", "checkpointing", "strategies", ["every-0"]),
        ("memory", "checkpointing", "sizes", ["huge"]),
        ("memory", "checkpointing", "size", "xl"),
        ("profile", None, "profiler", "nvprof"),
        *(("profile", None, "nsys_options", [o]) for o in ("stats", "--output=x", "--a=$(id)")),
    ],
)
def test_what_does_not_exist_is_one_line(
    chapter: str, part: str | None, key: str, wrong: Any
) -> None:
    place = ".".join(word for word in (chapter, part, key) if word)
    with pytest.raises(ConfigError, match=rf"^[^\n]*{place}[^\n]*(allowed|now called)[^\n]*$"):
        points(chapter, part, **{key: wrong})
