"""Points of the attention chapter small enough to measure in milliseconds, for tests to vary."""

from __future__ import annotations

from typing import Any

from lmlab.study.points import Point, Scalar
from tests.jobs.points import SETTINGS

RACE = {"samples": 3, "variant_cap_s": 0.05, "seed": 0, "batch": 1, "causal": True}


def naive_point(**changes: Any) -> Point:
    """Naive attention over a few tokens, changed as asked."""
    settings = {
        "batch": 2,
        "precision": "fp32",
        "causal": False,
        "warmup": 1,
        "steps": 3,
        "variants": ["naive"],
        "time_cap_s": 30.0,
        "seed": 0,
        **changes,
    }
    return Point("attention", {"topic": "naive", "head_dim": 8, "sequence": 32}, settings)


def benchmark_point(*arms: str, sequence: int = 64, precision: str = "fp32", **more: Any) -> Point:
    """Some variants over one short sequence."""
    parameters: dict[str, Scalar] = {
        "topic": "benchmark",
        "precision": precision,
        "head_dim": 16,
        "sequence": sequence,
    }
    return Point("attention", parameters, {**RACE, "variants": list(arms), **more})


def tiles_point(direction: str = "forward", **changes: Any) -> Point:
    """One cut of one small problem."""
    settings = {
        **RACE,
        "heads": 2,
        "sequence": 64,
        "precision": "fp32",
        "stages": 2,
        "tiles": [[32, 32], [16, 32]],
        "attention": "flash",
        **changes,
    }
    return Point("attention", {"topic": "tiles", "head_dim": 16, "direction": direction}, settings)


def leaderboard_point() -> Point:
    """The leaderboard's point in small."""
    settings = {**RACE, "heads": 2, "sequence": 64, "precision": "fp32", "variants": ["sdpa_math"]}
    return Point("attention", {"topic": "leaderboard", "head_dim": 16}, settings)


def model_point(topic: str, *arms: str, **changes: Any) -> Point:
    """A train step of a model with a few thousand parameters."""
    settings = {
        **SETTINGS,
        "batch": 2,
        "precision": "fp32",
        "mode": "train_step",
        "attention": "naive",
        "warmup": 1,
        **({"variants": list(arms)} if arms else {}),
        **changes,
    }
    return Point("attention", {"topic": topic, "size": "custom", "context": 8}, settings)
