"""What can be set for a point on the command line: each key's kind and what it may hold.

The same limits as in config.yaml's schema, said for single values: there a grid is given as lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lmlab import import_path
from lmlab.attention import registry as attention
from lmlab.study.points import Scalar

Value: TypeAlias = Scalar | list[Any]


class KeyValueError(ValueError):
    """A key that does not exist or a value that it cannot hold, in one line."""


@dataclass(frozen=True)
class Kind:
    """How a key's text becomes a value; `read` raises ValueError for what is not allowed."""

    allowed: str
    read: Callable[[str], Value]


def integer(minimum: int) -> Kind:
    """A whole number from `minimum` up."""

    def read(text: str) -> int:
        if int(text) < minimum:
            raise ValueError
        return int(text)

    return Kind(f"an integer of at least {minimum}", read)


def positive_number() -> Kind:
    """A number above zero, infinity excluded."""

    def read(text: str) -> float:
        if not 0 < float(text) < float("inf"):
            raise ValueError
        return float(text)

    return Kind("a number above 0", read)


def choice(*names: str) -> Kind:
    """One of some names."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Kind(", ".join(names), read)


def boolean() -> Kind:
    """true or false, as YAML writes them."""
    return Kind("true, false", lambda text: {"true": True, "false": False}[text])


def path_to(what: str, names: Iterable[str], check: Callable[[str], object]) -> Kind:
    """A known name or an import path, as `check` accepts it."""

    def read(text: str) -> str:
        check(text)
        return text

    return Kind(", ".join([*names, what]), read)


def several(one: Kind) -> Kind:
    """A list of such values, with commas between them."""
    return Kind(
        f"several, with commas between them, of: {one.allowed}",
        lambda text: [one.read(part) for part in text.split(",")],
    )


def tile() -> Kind:
    """Rows that are kept and rows that are walked, as 128x64."""

    def read(text: str) -> list[int]:
        kept, walked = map(int, text.split("x"))
        return [kept, walked]

    return Kind("rows kept x rows walked, as 128x64", read)


VARIANT = path_to("an import path package.module:function", attention.VARIANTS, attention.module_of)

KINDS: dict[str, Kind] = {
    "context": integer(1),
    "batch": integer(1),
    "precision": choice("fp32", "tf32", "bf16", "fp16"),
    "mode": choice("forward", "forward_backward", "train_step"),
    "attention": VARIANT,
    "warmup": integer(0),
    "start": choice("warm", "cold"),
    "model": path_to("an import path package.module:Class", (), import_path.split),
    "vocab_size": integer(2),
    "d_model": integer(1),
    "d_ff": integer(1),
    "num_layers": integer(1),
    "num_heads": integer(1),
    "rope_theta": positive_number(),
    "seed": integer(0),
    "steps": integer(1),
    "time_cap_s": positive_number(),
    "skip_if_too_large": boolean(),
    "topic": choice(
        *("accumulation", "autocast", "layernorm"),
        *("naive", "model_compile", "benchmark", "tiles", "leaderboard", "model"),
    ),
    "dtype": choice("fp16", "bf16"),
    "terms": integer(1),
    "term": positive_number(),
    "quick": boolean(),
    "sequence": integer(1),
    "head_dim": integer(1),
    "heads": integer(1),
    "causal": boolean(),
    "direction": choice("forward", "backward"),
    "stages": integer(1),
    "samples": integer(1),
    "arm_cap_s": positive_number(),
    "arms": several(VARIANT),
    "tiles": several(tile()),
}


def read_value(key: str, text: str, kind: Kind) -> Value:
    """The value that the text stands for, or a `KeyValueError`."""
    try:
        return kind.read(text)
    except (ValueError, KeyError):
        raise KeyValueError(f"{key} = {text!r}; allowed: {kind.allowed}") from None
