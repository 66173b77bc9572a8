"""Results spoilt on purpose: one drawn change in a real one, in its values or in its text."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

PLACEHOLDER = "@@spoilt@@"
# As JSON text, because some of these are no JSON, or no value that Python would write.
VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e300", "1e300", "0", "-1", "0.5", "1e-300"),
    *("null", "true", '""', '"text"', '"../../x"', '"\\u0000\\n|<b>"', "[]", "{}", "[null]"),
    *('{"a": 1}', "9" * 30, "9" * 400, "9" * 5000, "[" * 60 + "]" * 60, "[" * 200_000),
)


def spoilt(text: str, draw: Random) -> str:
    """The text of a result after one drawn change."""
    if draw.random() < 0.1:
        return _spoilt_text(text, draw)
    values = json.loads(text)
    holder, key = _place(values, draw)
    action = draw.choice(["replace"] * 6 + ["delete", "rename", "repeat"])
    if action == "delete":
        del holder[key]
    elif action == "rename" and isinstance(holder, dict):
        holder[draw.choice(["status", "x", "value", ""])] = holder.pop(key)
    elif action == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = PLACEHOLDER
    return json.dumps(values).replace(f'"{PLACEHOLDER}"', draw.choice(VALUES))


def _place(values: Any, draw: Random) -> tuple[Any, Any]:
    """A container somewhere in the result, and a key of it."""
    holder = values
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.15:
            return holder, key
        holder = inner


def _spoilt_text(text: str, draw: Random) -> str:
    """Cut off, or with a character changed."""
    at = draw.randrange(len(text))
    if draw.random() < 0.3:
        return text[:at]
    return text[:at] + draw.choice('"{}[],:0e-\x00é') + text[at + 1 :]
