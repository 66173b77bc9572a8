"""A point is one measurement: a chapter and what was set for it.

Its `parameters` are its identity and give its path, one folder per parameter:

    results/nvidia-h200/end_to_end/size~small/context~128/.../start~warm.json

Its `settings` are everything else that affects the numbers (hyper-parameters behind a size's name,
seed, number of steps). A changed setting replaces a result, a changed parameter adds one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

Scalar: TypeAlias = str | int | float | bool

SEPARATOR = "~"
SAFE_VALUE = re.compile(r"[A-Za-z0-9_.+-]+\Z")


@dataclass(frozen=True)
class Point:
    """One thing to measure: where it belongs, what identifies it, what else influences it."""

    chapter: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def path(self, results: Path, machine: str) -> Path:
        """Path of this point's result; the last parameter names the file."""
        named = self.parameters.items()
        parts = [self.chapter, *(f"{key}{SEPARATOR}{_path_part(key, v)}" for key, v in named)]
        return Path(results, machine, *parts[:-1], f"{parts[-1]}.json")

    def label(self) -> str:
        """The point on one line, for people."""
        return " ".join([self.chapter, *(f"{k}={v}" for k, v in self.parameters.items())])

    def to_json(self) -> str:
        """One line of JSON, identical for equal points."""
        return json.dumps(vars(self), separators=(",", ":"))


def crossed(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the axes; the last one varies fastest."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def point_from_json(text: str) -> Point:
    """Read what `Point.to_json` wrote."""
    try:
        values = json.loads(text)
        return Point(values["chapter"], values["parameters"], values["settings"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"point {text[:80]!r} is not a JSON object with chapter, parameters and settings"
        ) from error


def _path_part(key: str, value: Scalar) -> str:
    text = str(value).replace(":", ".")  # in import paths, such as a user's own attention
    if not SAFE_VALUE.match(text) or text in {".", ".."}:
        raise ValueError(
            f"{key} = {text!r} cannot be part of a path; "
            "allowed: letters, digits, '_', '.', '+' and '-'"
        )
    return text
