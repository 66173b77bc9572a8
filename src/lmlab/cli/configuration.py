"""config.yaml as the command line finds it: the file of the working folder, else the project's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmlab.study.config import ConfigError
from lmlab.study.files import ROOT


class RepeatedKey(ValueError):
    """A key that stands twice in one mapping, of which YAML takes the last without a word."""

    def __init__(self, node: yaml.Node) -> None:
        self.line = node.start_mark.line + 1
        super().__init__(f"{node.value!r} is given twice; allowed: each key once")


class _Loader(yaml.SafeLoader):
    """Reads plain YAML, every key once."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """A mapping as it is written: merged ones (`<<`) may well bring a key again."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RepeatedKey(key)
            seen.add(key.value)
        return node


def read_config(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration with `key=value` overrides; not yet checked."""
    here = Path("config.yaml")
    path = file or (here if here.exists() else ROOT / "config.yaml")
    try:
        config = yaml.load(path.read_text(), _Loader)
    except RepeatedKey as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not a readable YAML file ({line})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds {type(config).__name__}, allowed: keys and values")
    return _merged(config, {key: _value(key, text) for key, text in map(split, overrides)})


def _merged(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a mapping one by one, as Snakemake does: what is not named in it stays."""
    merged = dict(config) if isinstance(config, Mapping) else {}
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def _value(key: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RepeatedKey as error:
        raise ConfigError(f"config: {key} = {text!r}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {key} = {text!r} is not a YAML value") from error


def split(word: str) -> tuple[str, str]:
    """Key and value of `key=value`."""
    key, equals, value = word.partition("=")
    if not key or not equals:
        raise ConfigError(f"{word!r} is not key=value")
    return key, value
