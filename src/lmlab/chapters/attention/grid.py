"""Attention: six topics, from the naive formula to our own kernels inside the model.

A point is a comparison: the variants in its setting `variants` are measured against each other in
one process. Those that compile cost seconds per shape, so a block lists the shapes at which they
run.

Values come from the block `attention` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point, Scalar

COMPILES = ("compiled", "flex")
Block = Mapping[str, Any]


def points(study: Study, block: Block) -> list[Point]:
    """The points of every topic that the block names, in their order."""
    return [point for topic in block["topics"] for point in TOPICS[topic](study, block)]


def _naive(study: Study, block: Block) -> list[Point]:
    naive = block["naive"]
    beyond = [(shape["head_dim"], shape["sequence"]) for shape in naive["beyond"]]
    shapes = [*product(naive["head_dims"], naive["sequences"]), *beyond]
    return [
        _point(
            study,
            {"topic": "naive", "head_dim": head_dim, "sequence": sequence},
            _only(naive, "batch", "precision", "causal", "warmup", "steps"),
            variants=_variants_at(naive, head_dim, sequence),
            time_cap_s=study.common["time_cap_s"],
        )
        for head_dim, sequence in dict.fromkeys(shapes)
    ]


def _benchmark(study: Study, block: Block) -> list[Point]:
    asked = block["benchmark"]
    axes = product(asked["precisions"], asked["head_dims"], asked["sequences"])
    return [
        _point(
            study,
            {
                "topic": "benchmark",
                "precision": precision,
                "head_dim": head_dim,
                "sequence": sequence,
            },
            {**_only(asked, "batch", "samples", "variant_cap_s"), "causal": True},
            variants=_variants_at(asked, head_dim, sequence),
        )
        for precision, head_dim, sequence in axes
    ]


def _tiles(study: Study, block: Block) -> list[Point]:
    """`block_m` and `block_n` are those of the forward pass. Backward swaps them, so that the tile
    which a program holds (there of keys) takes the same sizes."""
    asked = block["tiles"]
    shared = _only(asked, "batch", "heads", "sequence", "precision", "stages")
    pairs = list(product(asked["block_m"], asked["block_n"]))
    tiles = {
        "forward": [[held, streamed] for held, streamed in pairs],
        "backward": [[streamed, held] for held, streamed in pairs],
    }
    return [
        _point(
            study,
            {"topic": "tiles", "head_dim": head_dim, "direction": direction},
            {**shared, **_only(asked, "samples", "variant_cap_s"), "causal": True},
            tiles=tiles[direction],
            attention="flash",
        )
        for head_dim, direction in product(asked["head_dims"], tiles)
    ]


def _leaderboard(study: Study, block: Block) -> list[Point]:
    asked = block["leaderboard"]
    keys = ("batch", "heads", "sequence", "precision", "variants", "samples", "variant_cap_s")
    return [
        _point(
            study,
            {"topic": "leaderboard", "head_dim": head_dim},
            {**_only(asked, *keys), "causal": True},
        )
        for head_dim in asked["head_dims"]
    ]


def _model(study: Study, block: Block) -> list[Point]:
    asked = block["model"]
    return [
        _model_point(study, asked, "model", size, context, attention=asked["variants"][0])
        for size, context in product(block["sizes"], asked["contexts"])
    ]


def _model_compile(study: Study, block: Block) -> list[Point]:
    asked = block["model_compile"]
    attention = study.common["attention"]
    return [
        _model_point(study, asked, "model_compile", size, asked["context"], attention=attention)
        for size in block["sizes"]
    ]


TOPICS: dict[str, Callable[[Study, Block], list[Point]]] = {
    "naive": _naive,
    "model_compile": _model_compile,
    "benchmark": _benchmark,
    "tiles": _tiles,
    "leaderboard": _leaderboard,
    "model": _model,
}


def _model_point(
    study: Study, asked: Block, topic: str, size: str, context: int, *, attention: str
) -> Point:
    variants = {"variants": asked["variants"]} if "variants" in asked else {}
    return _point(
        study,
        {"topic": topic, "size": size, "context": context, **study.own_model()},
        {
            **study.size_settings(size),
            **_only(asked, "batch", "precision", "warmup", "steps"),
            "mode": "train_step",
            "attention": attention,
            "time_cap_s": study.common["time_cap_s"],
            **variants,
        },
    )


def _point(study: Study, parameters: Mapping[str, Scalar], settings: Block, **more: Any) -> Point:
    return Point("attention", parameters, {**settings, **more, "seed": study.common["seed"]})


def _variants_at(asked: Block, head_dim: int, sequence: int) -> list[str]:
    """The variants that take part at a shape."""
    compiling = asked["compile"]
    if head_dim in compiling["head_dims"] and sequence in compiling["sequences"]:
        return list(asked["variants"])
    return [name for name in asked["variants"] if name not in COMPILES]


def _only(asked: Block, *keys: str) -> dict[str, Any]:
    return {key: asked[key] for key in keys}
