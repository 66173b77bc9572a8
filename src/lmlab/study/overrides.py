"""Values that were written on Snakemake's command line.

`--config studies='{nano: {end_to_end: {steps: 4}}}'` reaches a workflow with the text "4" in it:
Snakemake gives a type to single values alone, and leaves what is inside of mappings and lists as it
was typed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def retyped(given: Mapping[str, Any]) -> dict[str, Any]:
    """The mappings and lists among overrides, with what is inside read as config.yaml is read."""
    return {key: _read(value) for key, value in given.items() if isinstance(value, Mapping | list)}


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _read(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_read(inside) for inside in value]
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value  # a text that is no YAML, such as "a: b: c", is a text


def words(given: Mapping[str, Any]) -> list[str]:
    """Overrides as they are written on a command line."""
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()}"
        if isinstance(value, Mapping | list)
        else f"{key}={value}"
        for key, value in given.items()
    ]
