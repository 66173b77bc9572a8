"""Configuration as text: YAML files and `key=value` overrides, every key once.

YAML silently keeps the last of two duplicate keys. Snakemake's `--config` gives types to single
values only, and leaves "4" inside a mapping as a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmlab.study.config import ConfigError


class RepeatedKey(ValueError):
    """A key that is given twice in one mapping."""

    def __init__(self, node: yaml.Node) -> None:
        self.line = node.start_mark.line + 1
        super().__init__(f"{node.value!r} is given twice; allowed: each key once")


class _Loader(yaml.SafeLoader):
    """Reads plain YAML, every key once."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """A mapping as it is written: a merged one (`<<`) may bring a key again."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RepeatedKey(key)
            seen.add(key.value)
        return node


def parse(text: str) -> Any:
    """The value of a YAML text, or a `RepeatedKey` or YAMLError."""
    return yaml.load(text, _Loader)


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a file, or a `ConfigError`."""
    try:
        text = path.read_text()
        # YAML forbids the tabs that JSON allows.
        config = parse(text.expandtabs() if path.suffix == ".json" else text)
    except RepeatedKey as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not a readable YAML file ({line})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds {type(config).__name__}, allowed: keys and values")
    return config


def typed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The mappings and lists among Snakemake's overrides, with their values typed as in a file."""
    return {
        key: _typed(value) for key, value in overrides.items() if isinstance(value, Mapping | list)
    }


def _typed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value  # "a: b: c" is a string
