"""Drawn changes of the H200's results: a bad file is named, and costs its own numbers alone."""

from __future__ import annotations

import contextlib
import io
import shutil
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure

from lmlab.cli.report import write_report
from lmlab.jobs.catalog import all_points
from lmlab.study import results
from lmlab.study.config import load
from lmlab.study.files import REFERENCES, ROOT, TEMPLATES
from lmlab.study.points import Point
from lmlab.study.results import ResultError, read, read_of
from tests.report.mutations import spoilt

MACHINE = "nvidia-h200"
PER_CHAPTER = 6  # the smallest, because reading takes as long as they are


def small_config() -> dict[str, Any]:
    """The full study with two sizes and two contexts, of which every result is committed."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    for block in config["studies"]["full"].values():
        if isinstance(block, dict) and {"sizes", "contexts"} <= block.keys():
            block.update(sizes=["small", "xl"], contexts=[128, 512])
    return config


def measured(config: dict[str, Any]) -> list[tuple[Point, Path]]:
    """Points of the study whose results are committed, with their files."""
    points = all_points(load(config, "cuda"))
    paths = [(point, point.path(ROOT / "results", MACHINE)) for point in points]
    return [(point, path) for point, path in paths if path.exists()]


def check_loading(path: Path, point: Point) -> bool:
    """Whether the file is accepted; if not, the error is one line that names it."""
    try:
        read_of(point, path, MACHINE)
        return True
    except ResultError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return False


@pytest.mark.parametrize("draws", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_changed_result_is_read_or_named(draws: int, tmp_path: Path) -> None:
    draw, file = Random(draws), tmp_path / "result.json"
    by_size = sorted(measured(small_config()), key=lambda found: found[1].stat().st_size)
    chapters = {point.chapter for point, _ in by_size}
    texts = [
        (point, path.read_text())
        for chapter in sorted(chapters)
        for point, path in [found for found in by_size if found[0].chapter == chapter][:PER_CHAPTER]
    ]
    accepted = 0
    for _ in range(draws):
        point, text = draw.choice(texts)
        file.write_text(spoilt(text, draw))
        accepted += check_loading(file, point)
    assert 0.05 * draws < accepted < 0.8 * draws, "both kinds are drawn"


@pytest.mark.parametrize("draws", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_no_changed_result_stops_a_page(
    draws: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # slow, and drawn already
    unchanged = cache(read)
    monkeypatch.setattr(
        results,
        "read",
        lambda path: (read if path == file else unchanged)(path),
    )
    draw, file = Random(draws), Path()
    config = small_config()
    points = measured(config)
    for _, path in points:
        copied = Path("results", path.relative_to(ROOT / "results"))
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    named = 0
    for _ in range(draws):
        point, _ = draw.choice(points)
        file = point.path(Path("results"), MACHINE)
        text = file.read_text()
        file.write_text(spoilt(text, draw))
        lines, printed = rendered(one_chapter(config, point.chapter))
        assert "Traceback" not in printed
        assert not [line for line in lines if line.startswith("not rendered")], lines
        front = Path("report/writeup.md").read_text().replace("\\", "")
        if lines or not check_loading(file, point):
            assert str(file) in lines[0]
            assert str(file) in front
            named += 1
        file.write_text(text)
    assert named


def one_chapter(config: dict[str, Any], chapter: str) -> dict[str, Any]:
    """The study with that chapter alone, and the machine."""
    for name, block in config["studies"]["full"].items():
        if "enabled" in block:
            block["enabled"] = name == chapter
    return config


def rendered(config: dict[str, Any]) -> tuple[list[str], str]:
    """What a report of the results complains about, and what it prints."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        lines = write_report(
            config,
            machine=MACHINE,
            device="cuda",
            results=Path("results"),
            templates=TEMPLATES,
            references=REFERENCES,
            out=Path("report"),
        )
    return lines, printed.getvalue()
