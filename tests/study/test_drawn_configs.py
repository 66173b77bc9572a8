"""Drawn configurations: valid ones give points, those one field away end in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from lmlab.jobs.catalog import all_points
from lmlab.study import config_file
from lmlab.study.config import ConfigError, load
from lmlab.study.files import ROOT
from lmlab.study.schema import _inlined, config_schema

Config = dict[str, Any]
# As YAML text: some are no value that Python would write.
BAD = (
    *("-1", "1e400", ".nan", "null", "[]", "{}", "[[1]]", "{a: 1}", '"a\\n/../../b"', "9" * 30),
    *("9" * 401, "9" * 5001, "!!timestamp q", "!!bool maybe", "!!int x", "!!python/name:os.system"),
    *(
        "[" * 400,
        "&a [*a]",
        "{a: 1, a: 2}",
        "2020-01-01",
        "!!binary =",
        "\x01",
        "'",
        "../up",
        "1.5",
    ),
)
SCHEMA = _inlined(config_schema())
STUDY = SCHEMA["properties"]["studies"]["properties"]["nano"]


@pytest.fixture(scope="module")
def base() -> Config:
    """The configuration with its smallest study three times: checking takes as long as it is."""
    config: Config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["studies"] = dict.fromkeys(config["studies"], config["studies"]["nano"])
    config["study"] = "nano"
    return config


def leaves(value: Any, schema: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Path and schema of everything that may be drawn again."""
    if isinstance(value, dict):
        for key, inner in value.items():
            of_key = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if of_key:
                yield from leaves(inner, of_key, (*path, key))
    else:
        yield path, schema


def drawn(schema: Any, draw: Random, sizes: list[str]) -> Any:
    """A value that the schema allows; a string is a size."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    kind = schema["type"]
    if kind == "array":
        least, most = schema.get("minItems", 1), schema.get("maxItems", 3)
        items = [drawn(schema["items"], draw, sizes) for _ in range(draw.randint(least, most))]
        unique = [item for index, item in enumerate(items) if item not in items[:index]]
        return unique if len(unique) >= least else items
    if kind == "integer":
        low, step = schema["minimum"], schema.get("multipleOf", 1)
        return draw.randrange(
            low, min(schema.get("maximum", low + 64 * step), low + 64 * step), step
        )
    if kind == "number":
        return draw.choice([n for n in (0.5, 1, 2.5, 100) if n <= schema.get("maximum", n)])
    return draw.random() < 0.5 if kind == "boolean" else draw.choice(sizes)


def redrawn(base: Config, draw: Random) -> Config:
    """The configuration with some values of its study drawn again."""
    config = copy.deepcopy(base)
    nano = config["studies"]["nano"]
    config["studies"] = dict.fromkeys(config["studies"], nano)
    places = [
        (path, schema)
        for path, schema in leaves(nano, STUDY)
        if not any(f'"{word}"' in json.dumps(schema) for word in ("pattern", "object"))
        and ('"string"' not in json.dumps(schema) or path[-1] in ("size", "sizes"))
    ]
    for path, schema in draw.sample(places, draw.randint(1, 4)):
        put(nano, path, drawn(schema, draw, list(config["sizes"])))
    steps = nano["end_to_end"]
    steps["max_steps"] = max(steps["steps"], steps["max_steps"])  # the one rule between two keys
    return config


def put(config: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def spoilt(config: Config, draw: Random, file: Path) -> tuple[str, ...]:
    """Spoil one field of the configuration, as from a file; returns its name and its block's."""
    path = draw.choice([path for path, _ in leaves(config, SCHEMA)])
    action = draw.choice(["value"] * 6 + ["missing", "unknown"])
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    if action == "missing":
        del holder[path[-1]]
    elif action == "unknown":
        holder[f"{path[-1]}_"] = 1
    else:
        file.write_text(f"{path[-1]}: {draw.choice(BAD)}\n")
        holder.update(config_file.read(file))
    return tuple(map(str, path[-2:]))


@pytest.mark.parametrize("draws", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_configuration_gives_points_or_one_line(
    draws: int, base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, file = Random(draws), Path("config.yaml")
    valid = rejected = 0
    for number in range(draws):
        config = redrawn(base, draw)
        if number % 2:
            assert all_points(load(config, "cpu")), config
            valid += 1
            continue
        names: tuple[str, ...] = (str(file),)
        try:
            names = spoilt(config, draw, file)
            all_points(load(config, "cpu"))
        except ConfigError as error:
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
