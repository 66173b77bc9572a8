"""Attention: eight topics, from the naive formula to our own kernels inside the model.

A point is a comparison: the variants in its setting `variants` are measured against each other in
one process. Those that compile cost seconds per shape, so a block lists the shapes at which they
run.

Values come from the block `attention` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point, Scalar

COMPILES = ("compiled", "flex", "flash_compiled_backward")
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


def _shapes(study: Study, block: Block) -> list[Point]:
    asked = block["shapes"]
    axes = product(asked["precisions"], asked["batches"], block["sizes"], asked["contexts"])
    names = ("precision", "batch", "size", "context")
    return [_size_point(study, asked, "shapes", names, values, "variants") for values in axes]


def _softmax(study: Study, block: Block) -> list[Point]:
    asked, names = block["softmax"], ("size", "context")
    axes = product(block["sizes"], asked["contexts"])
    return [
        _size_point(study, asked, "softmax", names, values, "batch", "precision") for values in axes
    ]


def _tiles(study: Study, block: Block) -> list[Point]:
    """`block_m` and `block_n` are those of the forward pass. Backward swaps them, so that the tile
    which a program holds (there of keys) takes the same sizes."""
    asked = block["tiles"]
    shared = _only(asked, "batch", "heads", "sequences", "precision", "stages")
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
            {
                **_only(asked, *keys),
                **{f"sustained_{key}": each for key, each in asked["sustained"].items()},
                "causal": True,
            },
        )
        for head_dim in asked["head_dims"]
    ]


def _model(study: Study, block: Block) -> list[Point]:
    asked = block["model"]
    return [
        _model_point(
            study,
            asked,
            {"topic": "model", "size": size, "context": context},
            **_only(asked, "precision", "variants"),
            attention=asked["variants"][0],
        )
        for size, context in product(block["sizes"], asked["contexts"])
    ]


def _model_compile(study: Study, block: Block) -> list[Point]:
    asked = block["model_compile"]
    context = _only(asked, "context")
    return [
        _model_point(
            study,
            asked,
            {"topic": "model_compile", "size": size, **context, "precision": precision},
            attention=study.common["attention"],
        )
        for precision, size in product(asked["precisions"], block["sizes"])
    ]


TOPICS: dict[str, Callable[[Study, Block], list[Point]]] = {
    "naive": _naive,
    "softmax": _softmax,
    "model_compile": _model_compile,
    "benchmark": _benchmark,
    "shapes": _shapes,
    "tiles": _tiles,
    "leaderboard": _leaderboard,
    "model": _model,
}


def _size_point(
    study: Study,
    asked: Block,
    topic: str,
    names: Sequence[str],
    values: Sequence[Scalar],
    *keys: str,
) -> Point:
    """Attention alone, in the shape that it has in a model of some size."""
    parameters = {"topic": topic, **dict(zip(names, values, strict=True))}
    size = asdict(study.sizes[str(parameters["size"])])
    settings = _only(asked, *keys, "samples", "variant_cap_s")
    return _point(study, parameters, {**size, **settings}, causal=True)


def _model_point(
    study: Study, asked: Block, parameters: Mapping[str, Scalar], **more: Any
) -> Point:
    return _point(
        study,
        {**parameters, **study.own_model()},
        {
            **study.size_settings(str(parameters["size"])),
            **_only(asked, "batch", "warmup", "steps"),
            "mode": "train_step",
            "time_cap_s": study.common["time_cap_s"],
        },
        **more,
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
