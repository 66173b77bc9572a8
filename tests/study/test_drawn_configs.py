"""Drawn configurations: valid ones give points, those one field away end in one line."""

import copy
import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lmlab.jobs.catalog import all_points
from lmlab.study import config_file, schema
from lmlab.study.config import load
from tests import project

Config = dict[str, Any]
# As YAML text: some are no value that Python would write.
BAD = (
    *("-1", "1e400", ".nan", "null", "[]", "{}", "[[1]]", "{a: 1}", '"a\\n/../../b"', "9" * 30),
    *("9" * 401, "9" * 5001, "!!timestamp q", "!!bool maybe", "!!int x", "!!python/name:os.system"),
    *("[" * 100, "&a [*a]", "{a: 1, a: 2}", "2020-01-01", "!!binary =", "\x01"),
    *("'", "../up", "1.5"),
)
SCHEMA = copy.deepcopy(schema.config_schema())
STUDIES = SCHEMA["properties"]["studies"]
STUDY = STUDIES["properties"]["nano"]
# Checking a configuration takes as long as it is: one study with two chapters is enough.
STUDIES["required"], STUDY["required"] = ["nano"], ["common"]
CHAPTERS = 2


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """The configuration with its smallest study alone; in a folder of its own."""
    monkeypatch.setattr(schema, "config_schema", lambda: SCHEMA)
    monkeypatch.chdir(tmp_path)
    config = project.config()
    small = {name: size for name, size in config["sizes"].items() if name.startswith("cpu-")}
    studies = {"nano": config["studies"]["nano"]}
    return {**config, "study": "nano", "sizes": small, "studies": studies}


def leaves(value: Any, allowed: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            of_key = allowed.get("properties", {}).get(key, allowed.get("additionalProperties"))
            if of_key:
                yield from leaves(inner, of_key, (*path, key))
    else:
        yield path, allowed


def drawn(allowed: Any, draw: Random, sizes: list[str]) -> Any:
    """A value that the schema allows; a string is a size."""
    if "enum" in allowed:
        return draw.choice(allowed["enum"])
    kind = allowed["type"]
    if kind == "array":
        least, most = allowed.get("minItems", 1), allowed.get("maxItems", 3)
        items = [drawn(allowed["items"], draw, sizes) for _ in range(draw.randint(least, most))]
        unique = [item for index, item in enumerate(items) if item not in items[:index]]
        return unique if len(unique) >= least else items
    if kind == "integer":
        low, step = allowed["minimum"], allowed.get("multipleOf", 1)
        high = low + 64 * step
        return draw.randrange(low, min(allowed.get("maximum", high), high), step)
    if kind == "number":
        return draw.choice([n for n in (0.5, 1, 2.5, 100) if n <= allowed.get("maximum", n)])
    return draw.random() < 0.5 if kind == "boolean" else draw.choice(sizes)


def places(nano: Config) -> list[tuple[Any, Any]]:
    """What may be drawn again in a study: numbers, choices, sizes, and lists of them."""
    found = [(path, each, json.dumps(each)) for path, each in leaves(nano, STUDY)]
    return [
        (path, each)
        for path, each, text in found
        if not any(f'"{word}"' in text for word in ("pattern", "object"))
        and ('"string"' not in text or path[-1] in ("size", "sizes"))
    ]


def redrawn(base: Config, among: list[tuple[Any, Any]], draw: Random) -> Config:
    """The configuration with some chapters, and some of their values drawn again."""
    whole = base["studies"]["nano"]
    names = ["common", *draw.sample(sorted(whole.keys() - {"common"}), CHAPTERS)]
    nano = copy.deepcopy({name: whole[name] for name in names})
    mine = [place for place in among if place[0][0] in names]
    for path, each in draw.sample(mine, draw.randint(1, 4)):
        holder_of(nano, path)[path[-1]] = drawn(each, draw, list(base["sizes"]))
    if steps := nano.get("end_to_end"):
        # A rule between two keys, and the other one below.
        steps["max_steps"] = max(steps["steps"], steps["max_steps"])
    if ladder := nano.get("fastest_step"):
        ladder["batches"] = [ladder["batch"] * number for number in ladder["batches"]]
    return {**copy.deepcopy({**base, "studies": {}}), "studies": {"nano": nano}}


def holder_of(config: Any, path: tuple[Any, ...]) -> Any:
    return reduce(getitem, path[:-1], config)


def corrupted(config: Config, draw: Random, file: Path) -> tuple[str, ...]:
    """Corrupt one field of the configuration, as from a file; returns its name and its block's."""
    path = draw.choice([path for path, _ in leaves(config, SCHEMA)])
    action = draw.choice(["value"] * 6 + ["missing", "unknown"])
    holder = holder_of(config, path)
    if action == "missing":
        del holder[path[-1]]
    elif action == "unknown":
        holder[f"{path[-1]}_"] = 1
    else:
        file.write_text(f"{path[-1]}: {draw.choice(BAD)}\n")
        holder.update(config_file.read(file))
    return tuple(map(str, path[-2:]))


@pytest.mark.parametrize("draws", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_configurations_give_points_or_one_line(draws: int, base: Config, tmp_path: Path) -> None:
    among = places(base["studies"]["nano"])
    draw, file = Random(draws), Path("config.yaml")
    valid = rejected = 0
    for number in range(draws):
        config = redrawn(base, among, draw)
        if number % 2:
            study = load(config, "cpu")
            assert all_points(study) or not study.chapters, config
            valid += 1
            continue
        names: tuple[str, ...] = (str(file),)
        try:
            names = corrupted(config, draw, file)
            all_points(load(config, "cpu"))
        except ValueError as error:
            message = str(error)
        else:
            valid += 1
            continue
        rejected += 1
        assert "\n" not in message
        assert any(name in message for name in names)
    assert valid > 0.3 * draws
    assert rejected > 0.3 * draws
    assert list(tmp_path.iterdir()) == [file.resolve()]
