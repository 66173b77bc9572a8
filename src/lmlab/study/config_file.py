"""Configuration as text: YAML files and `key=value` overrides, without duplicate keys.

YAML silently keeps the last of two duplicate keys. Snakemake's `--config` converts scalars only at
the top level, and leaves "4" inside a mapping as a string. YAML also allows what makes no sense in
a configuration: values that contain themselves, values that do not fit their tag (`!!timestamp q`),
a few lines that expand to a billion values. Each of these is a one-line error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

DEEPEST, MOST_VALUES = 20, 100_000
TOO_DEEP = f"more than {DEEPEST} levels, more than {MOST_VALUES:,} values, or one inside itself"


class RepeatedKey(ValueError):
    """A key that is given twice in one mapping."""

    def __init__(self, node: yaml.Node) -> None:
        self.line = node.start_mark.line + 1
        super().__init__(f"{node.value!r} is given twice; allowed: each key once")


class _Loader(yaml.SafeLoader):
    """Load plain YAML and reject duplicate keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As in PyYAML, but a value that does not fit its tag raises a YAML error with its line."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            value = f"{str(node.value)[:40]!r} is not a value of the type {node.tag}"
            raise ConstructorError(None, None, value, node.start_mark) from error

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Check keys as written, before merging: a merge (`<<`) may repeat a key."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RepeatedKey(key)
            seen.add(key.value)
        return node


def parse(text: str) -> Any:
    """The value of a YAML text, or a `RepeatedKey` or YAMLError."""
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError(TOO_DEEP) from None
    _count(value, 0, 0)
    return value


def _count(value: object, depth: int, counted: int) -> int:
    """Count nested values; a YAMLError if there are too many or they are nested too deeply."""
    counted += 1
    if depth > DEEPEST or counted > MOST_VALUES:
        raise yaml.YAMLError(TOO_DEEP)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        counted = _count(each, depth + 1, counted)
    return counted


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a file, or a one-line ValueError."""
    try:
        text = path.read_text(encoding="utf-8")
        # YAML forbids the tabs that JSON allows.
        config = parse(text.expandtabs() if path.suffix == ".json" else text)
    except RepeatedKey as error:
        raise ValueError(f"{path}, line {error.line}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable YAML file ({line})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds no keys; allowed: keys and values")
    return config


def typed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Snakemake's overrides that are mappings or lists, with values typed as in a YAML file."""
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
        return parse(value)
    except (RepeatedKey, yaml.YAMLError):
        return value  # "a: b: c" is a string
