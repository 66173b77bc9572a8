"""The profile chapter's grid: one point a size and context, who records it among its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())


def with_block(**changes: Any) -> dict[str, Any]:
    """The configuration with other keys in the full study's profile block."""
    full = CONFIG["studies"]["full"]
    block = {**full["profile"], **changes}
    studies = {**CONFIG["studies"], "full": {**full, "profile": block}}
    return {**CONFIG, "study": "full", "studies": studies}


def test_the_full_study_profiles_every_size_at_every_context_in_fp32() -> None:
    points = points_of(load(with_block(), "cuda"), "profile")
    asked = {(point.parameters["size"], point.parameters["context"]) for point in points}
    sizes = ("small", "medium", "large", "xl", "2.7b")
    assert asked == {(size, context) for size in sizes for context in (128, 256, 512, 1024)}
    assert len(points) == 20
    assert {point.parameters["precision"] for point in points} == {"fp32"}
    assert {point.parameters["batch"] for point in points} == {4}


def test_another_profiler_replaces_a_result_instead_of_adding_one() -> None:
    paths = [
        points_of(load(with_block(profiler=name), "cuda"), "profile")[0].path(Path("r"), "m")
        for name in ("auto", "nsys", "torch")
    ]
    assert len(set(paths)) == 1


def test_a_profiler_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(ConfigError, match='profiler = "nvprof"; allowed: auto, nsys, torch'):
        load(with_block(profiler="nvprof"), "cuda")


def test_a_model_of_the_users_own_has_results_of_its_own() -> None:
    (first, *_) = points_of(load({**with_block(), "model": "mine:Net"}, "cuda"), "profile")
    assert first.parameters["own_model"] == "mine.Net"
    assert list(first.parameters)[-1] == "attention", "no path is a folder of another point's"
