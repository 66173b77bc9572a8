"""A file of configuration as it is written, every key once: YAML takes the last without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lmlab.study.config import ConfigError


class RepeatedKey(ValueError):
    """A key that stands twice in one mapping."""

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


def parse(text: str) -> Any:
    """What a YAML text says; `RepeatedKey` or a YAMLError if it says nothing clear."""
    return yaml.load(text, _Loader)


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a file, or a `ConfigError`."""
    try:
        text = path.read_text()
        # YAML forbids the tabs that JSON allows between its words.
        config = parse(text.expandtabs() if path.suffix == ".json" else text)
    except RepeatedKey as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not a readable YAML file ({line})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds {type(config).__name__}, allowed: keys and values")
    return config
