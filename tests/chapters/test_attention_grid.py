"""The attention grid: every shape of the study once, and compiled where the study allows it."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.chapters.attention import grid
from lmlab.chapters.attention.measure import compiling
from lmlab.jobs.catalog import points_of
from lmlab.study.config import load
from lmlab.study.files import ROOT
from lmlab.study.points import Point

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())


def points(study: str, **changes: Any) -> list[Point]:
    config = copy.deepcopy({**CONFIG, "study": study})
    config["studies"][study]["attention"].update(changes)
    return points_of(load(config, "cpu"), "attention")


def of(topic: str) -> list[Point]:
    return [point for point in points("full") if point.parameters["topic"] == topic]


def test_the_full_study_has_every_shape() -> None:
    counts = Counter(point.parameters["topic"] for point in points("full"))
    sizes = len(CONFIG["studies"]["full"]["attention"]["sizes"])
    attention = {"naive": 4 * 5 + 1, "benchmark": 10 * 4 * 2, "tiles": 4 * 2, "leaderboard": 2}
    models = {"model_compile": 2, "model": 4, "shapes": 6, "softmax": 4}
    assert counts == {**attention, **{topic: sizes * n for topic, n in models.items()}}


@pytest.mark.parametrize("study", ["full", "tiny", "nano"])
def test_every_point_has_its_own_path(study: str, tmp_path: Path) -> None:
    paths = [point.path(tmp_path, "m") for point in points(study)]
    assert len(set(paths)) == len(paths)


def test_variants_that_compile_take_part_where_the_study_says() -> None:
    block = copy.deepcopy(CONFIG["studies"]["full"]["attention"]["benchmark"])
    block["compile"] = {"head_dims": [64], "sequences": [1024]}
    compiled = [
        (point.parameters["head_dim"], point.parameters["sequence"])
        for point in points("full", benchmark=block, topics=["benchmark"])
        if {"flex", "compiled"} & set(point.settings["variants"])
    ]
    assert compiled == [(64, 1024)] * 2, "in both precisions"


def test_the_grid_knows_what_compiles() -> None:
    assert set(grid.COMPILES) == compiling.COMPILES, "the grid may not import what measures"


def test_the_leaderboard_is_the_published_shape() -> None:
    board = of("leaderboard")[0]
    asked = {**board.settings, **board.parameters}
    keys = ("batch", "heads", "sequence", "head_dim", "precision", "causal")
    assert [asked[key] for key in keys] == [1, 16, 16384, 64, "bf16", True]


def test_backward_swaps_the_tile_sizes_of_the_forward_pass() -> None:
    forward, backward = (point.settings["tiles"] for point in of("tiles")[:2])
    assert [128, 16] in forward
    assert [pair[::-1] for pair in backward] == forward
