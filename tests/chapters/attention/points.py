"""Small points of the attention chapter, and attention variants that fail, for tests to use."""

from typing import Any, NoReturn

from torch import Tensor

from lmlab.attention import naive
from lmlab.study.points import Point
from tests.jobs.points import SETTINGS

TURNS = {"samples": 3, "variant_cap_s": 0.05, "seed": 0, "batch": 1, "causal": True}
HEADS = {**TURNS, "heads": 2, "sequence": 64, "precision": "fp32"}
WRONG = f"{__name__}:last_rows_zero"
TOO_LARGE = f"{__name__}:too_large"


def last_rows_zero(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    output = naive.attention(q, k, v, is_causal=is_causal)
    return output * (output.new_ones(output.shape[-2]).cumsum(0) < 40)[:, None]


def too_large(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> NoReturn:
    raise MemoryError("no room")


def naive_point(*variants: str) -> Point:
    settings = {**TURNS, "batch": 2, "causal": False, "precision": "fp32", "variants": variants}
    settings |= {"warmup": 1, "steps": 3, "time_cap_s": 30.0}
    return Point("attention", {"topic": "naive", "head_dim": 8, "sequence": 32}, settings)


def benchmark_point(*variants: str, **changes: Any) -> Point:
    shape = {"topic": "benchmark", "precision": "fp32", "head_dim": 16, "sequence": 64}
    parameters = {key: changes.pop(key, value) for key, value in shape.items()}
    return Point("attention", parameters, {**TURNS, "variants": list(variants), **changes})


def size_point(topic: str, **more: Any) -> Point:
    """A topic over the attention of a small model: two heads of 16."""
    settings = {**TURNS, "batch": 3, "precision": "fp32", "d_model": 32, "num_heads": 2, **more}
    return Point("attention", {"topic": topic, "size": "custom", "context": 24}, settings)


def tiles_point(direction: str = "forward", attention: str = "flash") -> Point:
    settings = {**HEADS, "stages": 2, "tiles": [[32, 32], [16, 32]], "attention": attention}
    settings["sequences"] = [32, settings.pop("sequence")]
    return Point("attention", {"topic": "tiles", "head_dim": 16, "direction": direction}, settings)


def leaderboard_point() -> Point:
    sustained = {"sustained_variants": ["sdpa_math"], "sustained_warmup_ms": 1}
    settings = {**HEADS, "variants": ["sdpa_math"], **sustained, "sustained_rep_ms": 1}
    return Point("attention", {"topic": "leaderboard", "head_dim": 16}, settings)


def model_point(topic: str, *variants: str, **changes: Any) -> Point:
    settings = {**SETTINGS, "batch": 2, "precision": "fp32", "mode": "train_step", "warmup": 1}
    settings |= {"attention": "naive", "variants": list(variants), **changes}
    return Point("attention", {"topic": topic, "size": "custom", "context": 8}, settings)
