"""The fastest step: a ladder and its kernels per size, and the leaderboard's step.

A point of the ladder holds all rungs, because their ratios are taken in one process.

Values come from the block `fastest_step` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point

LADDER = (
    *("rungs", "attentions", "batches", "checkpoint", "warmup", "steps", "energy_s"),
    *("samples", "variant_cap_s"),
)
LEADERBOARD = ("attentions", "checkpoint", "warmup", "steps", "energy_s", "batches")


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The points of every topic that the block names, in their order."""
    return [point for topic in block["topics"] for point in TOPICS[topic](study, block)]


def _per_size(topic: str) -> Callable[[Study, Mapping[str, Any]], list[Point]]:
    def of(study: Study, block: Mapping[str, Any]) -> list[Point]:
        shape = {key: block[key] for key in ("context", "batch")}
        return [
            Point(
                "fastest_step",
                {"topic": topic, "size": size, **shape, **study.own_model()},
                {**study.size_settings(size), **_shared(study, block, LADDER), **_code(block)},
            )
            for size in block["sizes"]
        ]

    return of


def _leaderboard(study: Study, block: Mapping[str, Any]) -> list[Point]:
    asked = block["leaderboard"]
    common = {"rope_theta": study.common["rope_theta"], "seed": study.common["seed"]}
    settings = {**common, **_shared(study, block, LEADERBOARD), **asked, **_code(block)}
    sequence = settings.pop("sequence")
    return [Point("fastest_step", {"topic": "leaderboard", "sequence": sequence}, settings)]


def _shared(study: Study, block: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: block[key] for key in keys}, "time_cap_s": study.common["time_cap_s"]}


def _code(block: Mapping[str, Any]) -> dict[str, Any]:
    """The precision of the first rung, and the attentions whose code a result depends on."""
    return {"precision": "fp32", "variants": ["naive", *block["attentions"]]}


TOPICS: dict[str, Callable[[Study, Mapping[str, Any]], list[Point]]] = {
    "ladder": _per_size("ladder"),
    "kernels": _per_size("kernels"),
    "leaderboard": _leaderboard,
}
