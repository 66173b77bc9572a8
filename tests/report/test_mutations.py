"""Random corruption of the H200 results: a bad file is named and loses only its own numbers, and a
part of a page that fails on it loses only that part."""

import contextlib
import copy
import io
import json
import shutil
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure

from lmlab.jobs.catalog import all_points
from lmlab.report.provenance import MAX_LINES
from lmlab.study import results
from lmlab.study.config import load
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import ResultError, checked, parse, read
from tests.project import config, report
from tests.report.study import rewrite

MACHINE = "nvidia-h200"
LONGEST_LIST = 4
PLACEHOLDER = "@@corrupted@@"
# As JSON text, because some are invalid JSON or values that Python would not write.
VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e300", "1e300", "0", "-1", "0.5", "1e-300"),
    *("null", "true", '""', '"text"', '"../../x"', '"\\u0000\\n|<b>"', "[]", "{}", "[null]"),
    *('{"a": 1}', "9" * 30, "9" * 35 + "e9", "9" * 400, "9" * 5000),
    *("[" * 60 + "]" * 60, "[" * 200_000),
)


def corrupted(text: str, draw: Random) -> str:
    if draw.random() < 0.1:
        at, is_cut = draw.randrange(len(text)), draw.random() < 0.3
        return text[:at] + ("" if is_cut else draw.choice('"{}[],:0e-\x00é') + text[at + 1 :])
    values = json.loads(text)
    holder, key = _place(values, draw)
    action = draw.choice(["replace"] * 6 + ["delete", "rename", "repeat"])
    if action == "delete":
        del holder[key]
    elif action == "rename" and isinstance(holder, dict):
        holder[draw.choice(["status", "x", "value", ""])] = holder.pop(key)
    elif action == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = PLACEHOLDER
    return json.dumps(values).replace(f'"{PLACEHOLDER}"', draw.choice(VALUES))


def _place(values: Any, draw: Random) -> tuple[Any, Any]:
    holder = values
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.15:
            return holder, key
        holder = inner


def small_config() -> dict[str, Any]:
    """The full study reduced to two sizes and two contexts, for which all results are committed."""
    small = config()
    for block in small["studies"]["full"].values():
        if isinstance(block, dict) and {"sizes", "contexts"} <= block.keys():
            block.update(sizes=["small", "xl"], contexts=[128, 512])
    small["studies"]["full"]["end_to_end"]["graph_checks"] = []
    return small


def measured(config: dict[str, Any]) -> list[tuple[Point, Path]]:
    points = all_points(load(config, "cuda"))
    paths = [(point, point.path(ROOT / "results", MACHINE)) for point in points]
    return [(point, path) for point, path in paths if path.exists()]


def accepted(text: str, path: Path, point: Point) -> bool:
    """Whether a file with this text is accepted; if not, the error must be one line naming it."""
    try:
        checked(parse(text, path), point, path, MACHINE)
        return True
    except ResultError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return False


def trimmed(value: Any) -> Any:
    """The value with only the first entries of every list: changing those is enough."""
    if isinstance(value, list):
        return [trimmed(each) for each in value[:LONGEST_LIST]]
    if isinstance(value, dict):
        kept = {key: trimmed(each) for key, each in value.items()}
        return {**kept, "n": len(kept["samples"])} if "n" in kept else kept
    return value


@pytest.mark.parametrize("draws", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_changed_result_is_read_or_named(draws: int) -> None:
    draw = Random(draws)
    by_chapter = {point.chapter: (point, path) for point, path in measured(small_config())}
    texts = [
        (point, path, json.dumps(trimmed(json.loads(path.read_text()))))
        for point, path in by_chapter.values()
    ]
    assert all(accepted(text, path, point) for point, path, text in texts)
    count = 0
    for _ in range(draws):
        point, path, text = draw.choice(texts)
        count += accepted(corrupted(text, draw), path, point)
    assert 0.05 * draws < count < 0.8 * draws, "both kinds are drawn"


@pytest.mark.parametrize(
    ("rounds", "chapter_count"), [(1, 3), pytest.param(3, MAX_LINES, marks=pytest.mark.slow)]
)
def test_no_changed_result_stops_a_page(
    rounds: int, chapter_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round corrupts one result of each of so many chapters, then renders those chapters."""
    monkeypatch.chdir(tmp_path)
    draw, config = Random(rounds), small_config()
    points = copied(config)
    unchanged, texts = cache(read), dict[Path, str]()
    monkeypatch.setattr(results, "read", lambda path: (read if path in texts else unchanged)(path))
    named = 0
    for _ in range(rounds):
        chapters = draw.sample(sorted(points), chapter_count)
        drawn = [draw.choice(points[chapter]) for chapter in chapters]
        files = {point.path(Path("results"), MACHINE): point for point in drawn}
        texts |= {file: file.read_text() for file in files}
        for file in files:
            file.write_text(corrupted(texts[file], draw))
        lines, printed = rendered(only(config, chapters))
        assert "Traceback" not in printed
        faults = [line for line in lines if line.startswith("not rendered: ")]
        assert all(any(name in fault for name in chapters) for fault in faults), faults
        front = Path("report/writeup.md").read_text().replace("\\", "")
        blamed = {file for file in files if any(str(file) in line for line in lines)}
        rejected = {f for f, point in files.items() if not accepted(f.read_text(), f, point)}
        assert rejected <= blamed
        assert all(str(file) in front for file in blamed)
        named += len(blamed)
        for file, text in texts.items():
            file.write_text(text)
        texts.clear()
    assert named


def test_what_fails_costs_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable result of the repeat set, a page whose code raises, and the preface, which
    needs a setting that a result lacks."""
    monkeypatch.chdir(tmp_path)
    config = only(small_config(), ["precision", "end_to_end"])
    step = copied(config)["end_to_end"][0].path(Path("results"), MACHINE)
    rewrite(step, lambda values: values["settings"].pop("num_layers"))
    repeated = Path("results", f"{MACHINE}@repeat", *step.parts[2:])
    repeated.parent.mkdir(parents=True)
    repeated.write_text("{")
    monkeypatch.setattr("lmlab.chapters.precision.page.facts", Mock(side_effect=NameError("gone")))
    lines, _ = rendered(config)
    parts = [line.removeprefix("not rendered: ").split(":")[0] for line in lines]
    assert parts == [str(repeated), "precision", "preface.md.j2"]
    assert "precision: NameError: gone" in lines[1]
    assert "NameError: gone" in Path("report/chapters/precision.md").read_text()
    assert "could not be rendered" not in Path("report/chapters/end_to_end.md").read_text()
    assert "### How long is a step?" in Path("report/writeup.md").read_text()


def copied(config: dict[str, Any]) -> dict[str, list[Point]]:
    """Copy the study's results into this folder; returns their points by chapter."""
    points: dict[str, list[Point]] = {}
    for point, path in measured(config):
        points.setdefault(point.chapter, []).append(point)
        target = Path("results", path.relative_to(ROOT / "results"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return points


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is slow, and tested with the golden pages."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)


def only(config: dict[str, Any], chapters: list[str]) -> dict[str, Any]:
    for name, block in config["studies"]["full"].items():
        if "enabled" in block:
            block["enabled"] = name in chapters
    return config


def rendered(config: dict[str, Any]) -> tuple[list[str], str]:
    """Write a report of the results; returns its problems and what it printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        lines = report(config, MACHINE, "cuda", Path("results"), Path("report"))
    return lines, printed.getvalue()
