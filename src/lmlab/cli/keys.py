"""`key=value` arguments: overrides of config.yaml, and the keys that can be set for a point.

The latter are derived from the schema of config.yaml, where a grid is given as lists (`contexts`)
and a point has one value of each (`context`). A key that is not in the schema (`start`, `topic`)
accepts the values that the study's points have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from snakemake.utils import update_config

from lmlab.study import config_file
from lmlab.study.config import Study
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.schema import config_schema, why_invalid

Schema = Mapping[str, Any]
CONVERT: Mapping[str, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "boolean": {"true": True, "false": False}.__getitem__,
}


def read_config(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The working folder's config.yaml, or else the project's, with a file and overrides merged in
    as Snakemake does; not yet validated."""
    here = Path("config.yaml")
    config = config_file.read(here if here.exists() else ROOT / "config.yaml")
    update_config(config, config_file.read(file) if file else {})
    update_config(config, {key: _value(key, text) for key, text in map(split, overrides)})
    return config


def _value(key: str, text: str) -> Any:
    try:
        return config_file.parse(text)
    except config_file.RepeatedKey as error:
        raise ValueError(f"config: {key} = {text!r}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"config: {key} = {text!r} is not a YAML value") from error


def split(argument: str) -> tuple[str, str]:
    """Key and value of `key=value`."""
    key, equals, value = argument.partition("=")
    if not key or not equals:
        raise ValueError(f"{argument!r} is not key=value")
    return key, value


def schemas_for(points: Sequence[Point], study: Study) -> dict[str, Schema]:
    """The schema of every key that can be set for some of a chapter's points, in their order."""
    top, parts = config_schema()["properties"], config_schema()["$defs"]
    blocks = parts["study"]["properties"]
    known = {name: schema for name, schema in parts.items() if "properties" not in schema}
    for block in (top["ranks"], blocks["common"], parts["size"], blocks[points[0].chapter]):
        known |= _keys_in("", block)
    size = {"enum": list(study.sizes)}
    sizes = {"type": "array", "uniqueItems": True, "items": size}
    known |= {"model": top["model"], "size": size, "sizes": sizes}
    known.pop("topic", None)  # only those that the study has
    values: dict[str, list[Any]] = {}
    for point in points:
        for key, value in {**point.parameters, **point.settings}.items():
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return {key: known.get(key, {"enum": seen}) for key, seen in values.items()}


def read_value(key: str, text: str, schema: Schema) -> Any:
    """The value of a command-line argument, or an error that names what is allowed."""
    value = _convert(text, schema)
    if error := why_invalid(value, schema):
        allowed = error.partition("allowed: ")[2]
        several = "; several are separated by commas" if isinstance(value, list) else ""
        raise ValueError(f"{key} = {text!r}; allowed: {allowed}{several}")
    if key == "tiles":
        return [[int(rows) for rows in tile.split("x")] for tile in value]
    return value


def _keys_in(prefix: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Keys of a block and its nested blocks; a list's items also under the singular of its name."""
    for name, part in schema["properties"].items():
        if "properties" in part:
            yield from _keys_in(f"{name}_", part)
        else:
            yield name, part
            yield f"{prefix}{name}", part
            if part.get("type") == "array" and name.endswith("s"):
                yield name.removesuffix("es" if name.endswith("ches") else "s"), part["items"]


def _convert(text: str, schema: Schema) -> Any:
    """The text converted to the type of its schema; unchanged if that fails."""
    if schema.get("type") == "array":
        return [_convert(part, schema["items"]) for part in text.split(",")]
    try:
        return CONVERT.get(str(schema.get("type")), str)(text)
    except (ValueError, KeyError):
        return text
