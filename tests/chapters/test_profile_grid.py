"""The profile chapter's grid: one point per size and context; the profiler is a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT
from lmlab.study.points import Point

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())


def points(model: str = CONFIG["model"], **block: Any) -> list[Point]:
    """The full study's points with other keys in its profile block."""
    full = CONFIG["studies"]["full"]
    studies = {**CONFIG["studies"], "full": {**full, "profile": {**full["profile"], **block}}}
    config = {**CONFIG, "study": "full", "studies": studies, "model": model}
    return points_of(load(config, "cuda"), "profile")


def test_every_size_is_profiled_at_every_context() -> None:
    asked = [(point.parameters["size"], point.parameters["context"]) for point in points()]
    sizes = ("small", "medium", "large", "xl", "2.7b")
    assert asked == [(size, context) for size in sizes for context in (128, 256, 512, 1024)]


def test_another_profiler_replaces_a_result_instead_of_adding_one() -> None:
    paths = {points(profiler=name)[0].path(Path("r"), "m") for name in ("auto", "nsys", "torch")}
    assert len(paths) == 1


def test_an_unknown_profiler_is_one_line() -> None:
    with pytest.raises(ConfigError, match='profiler = "nvprof"; allowed: auto, nsys, torch'):
        points(profiler="nvprof")


def test_the_users_own_model_has_results_of_its_own() -> None:
    first, *_ = points(model="mine:Net")
    assert first.parameters["own_model"] == "mine.Net"
    assert list(first.parameters)[-1] == "attention", "no path is a folder of another point's"
