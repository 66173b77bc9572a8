"""The profile chapter's grid: one point per size, context and precision; tools are settings."""

from __future__ import annotations

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
BLOCK = CONFIG["studies"]["full"]["profile"]


def points(model: str = CONFIG["model"], **block: Any) -> list[Point]:
    """The full study's points with other keys in its profile block."""
    full = CONFIG["studies"]["full"]
    studies = {**CONFIG["studies"], "full": {**full, "profile": {**BLOCK, **block}}}
    config = {**CONFIG, "study": "full", "studies": studies, "model": model}
    return points_of(load(config, "cuda"), "profile")


def test_every_size_is_profiled_at_every_context_and_precision() -> None:
    axes = {"size": "sizes", "context": "contexts", "batch": "batches", "precision": "precisions"}
    asked = [tuple(point.parameters[axis] for axis in axes) for point in points()]
    assert asked == list(product(*(BLOCK[key] for key in axes.values())))
    own = points(model="mine:Net")[0].parameters
    assert own["own_model"] == "mine.Net"
    assert list(own)[-1] == "attention", "no path is a folder of another point's"


@pytest.mark.parametrize("changes", [{"profiler": "torch"}, {"nsys_options": ["--stats=true"]}])
def test_another_tool_replaces_a_result_instead_of_adding_one(changes: dict[str, Any]) -> None:
    first, other = (found[0].path(Path("r"), "m") for found in (points(), points(**changes)))
    assert first == other


@pytest.mark.parametrize(
    "wrong",
    [
        {"profiler": "nvprof"},
        *({"nsys_options": [o]} for o in ("stats", "--output=x", "--a=$(id)", "--kill=sigkill")),
    ],
)
def test_a_wrong_tool_or_option_is_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*profile\.{next(iter(wrong))}[^\n]* allowed: "):
        points(**wrong)
