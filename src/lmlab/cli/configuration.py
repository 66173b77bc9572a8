"""config.yaml as the command line finds it: the file of the working folder, else the project's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmlab.study import config_file
from lmlab.study.config import ConfigError
from lmlab.study.files import ROOT


def read_config(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration with `key=value` overrides; not yet checked."""
    here = Path("config.yaml")
    config = config_file.read(file or (here if here.exists() else ROOT / "config.yaml"))
    return _merged(config, {key: _value(key, text) for key, text in map(split, overrides)})


def _merged(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key, as Snakemake does."""
    merged = dict(config) if isinstance(config, Mapping) else {}
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def _value(key: str, text: str) -> Any:
    try:
        return config_file.parse(text)
    except config_file.RepeatedKey as error:
        raise ConfigError(f"config: {key} = {text!r}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {key} = {text!r} is not a YAML value") from error


def split(argument: str) -> tuple[str, str]:
    """Key and value of `key=value`."""
    key, equals, value = argument.partition("=")
    if not key or not equals:
        raise ConfigError(f"{argument!r} is not key=value")
    return key, value
