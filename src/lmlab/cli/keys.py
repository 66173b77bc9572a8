"""What can be set for a point on the command line: each key's kind and what it may hold.

The same limits as in config.yaml's schema, said for single values: there a grid is given as lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from lmlab import import_path
from lmlab.attention import registry as attention
from lmlab.study.points import Scalar

Value: TypeAlias = Scalar | list[Any]

LARGEST_SEED = 2**32 - 1
TILE_HEIGHTS = (16, 32, 64, 128, 256)


class KeyValueError(ValueError):
    """A key that does not exist or a value that it cannot hold, in one line."""


@dataclass(frozen=True)
class Kind:
    """How a key's text becomes a value; `read` raises ValueError for what is not allowed."""

    allowed: str
    read: Callable[[str], Value]


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """A whole number from `minimum` up, to `maximum` where there is one."""

    def read(text: str) -> int:
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError
        return number

    most = "" if maximum is None else f" and at most {maximum}"
    return Kind(f"an integer of at least {minimum}{most}", read)


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


def many(pattern: str, names: str) -> Kind:
    """Some names, separated by commas, each once."""

    def read(text: str) -> str:
        given = text.split(",")
        if not all(re.fullmatch(pattern, name) for name in given) or len(set(given)) < len(given):
            raise ValueError
        return text

    return Kind(f"{names}; several of them separated by commas, each once", read)


def several(kind: Kind) -> Kind:
    """A list of values of one kind, separated by commas, each once."""

    def read(text: str) -> list[Scalar]:
        values = [cast(Scalar, kind.read(part)) for part in text.split(",")]
        if len(set(map(str, values))) < len(values):
            raise ValueError
        return values

    return Kind(f"some of these, separated by commas, each once: {kind.allowed}", read)


def some_text() -> Kind:
    """A text that is not empty."""

    def read(text: str) -> str:
        if not text:
            raise ValueError
        return text

    return Kind("a text", read)


def boolean() -> Kind:
    """true or false, as YAML writes them."""
    return Kind("true, false", lambda text: {"true": True, "false": False}[text])


def path_to(what: str, names: Iterable[str], check: Callable[[str], object]) -> Kind:
    """A known name or an import path, as `check` accepts it."""

    def read(text: str) -> str:
        check(text)
        return text

    return Kind(", ".join([*names, what]), read)


def tile() -> Kind:
    """BLOCK_M x BLOCK_N, as 128x64."""

    def read(text: str) -> list[int]:
        block_m, block_n = map(int, text.split("x"))
        if not {block_m, block_n} <= set(TILE_HEIGHTS):
            raise ValueError
        return [block_m, block_n]

    heights = ", ".join(map(str, TILE_HEIGHTS))
    return Kind(f"BLOCK_M x BLOCK_N (query rows x key rows), as 128x64, each of {heights}", read)


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
    "seed": integer(0, LARGEST_SEED),
    "steps": integer(1),
    "time_cap_s": positive_number(),
    "skip_if_too_large": boolean(),
    "profiler": choice("auto", "nsys", "torch"),
    "keep_traces": boolean(),
    "topic": choice(
        *("timeline", "checkpointing", "accumulation", "autocast", "layernorm"),
        *("naive", "model_compile", "benchmark", "tiles", "leaderboard", "model"),
    ),
    "keep_snapshots": boolean(),
    "rounds": integer(1),
    "strategies": many(r"none|nested|every-[1-9]\d*", "none, nested, every-K"),
    "dtype": choice("fp16", "bf16"),
    "terms": integer(1),
    "term": positive_number(),
    "quick": boolean(),
    "placement": choice("own_gpu", "shared_gpu", "cpu"),
    "world_size": integer(1),
    "nnodes": integer(1),
    "operations": several(choice("all_reduce", "all_gather", "reduce_scatter", "broadcast")),
    "dtypes": several(choice("fp32", "bf16", "fp16")),
    "sizes_mib": several(integer(1)),
    "step_limit_s": positive_number(),
    "bucket_mb": positive_number(),
    "torch_bucket_mb": positive_number(),
    "bucket_sizes_mb": several(positive_number()),
    "num_blocks": integer(1),
    "gpu_memory_gb": positive_number(),
    "tokens": several(integer(1)),
    "device_name": some_text(),
    "device_memory_gb": positive_number(),
    "device_flops_per_s": positive_number(),
    "device_bytes_per_s": positive_number(),
    "fsdp": integer(2),
    "tp": integer(1),
    "fsdp_axes": integer(1),
    "tp_axes": integer(1),
    "ranks": several(integer(2)),
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

# Ranks are compared round by round, and a verdict needs a spread.
KINDS_OF_RANKS: dict[str, Kind] = {"rounds": integer(3)}


def read_value(key: str, text: str, kind: Kind) -> Value:
    """The value that the text stands for, or a `KeyValueError`."""
    try:
        return kind.read(text)
    except (ValueError, KeyError):
        raise KeyValueError(f"{key} = {text!r}; allowed: {kind.allowed}") from None
