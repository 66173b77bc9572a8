"""Attention: eight topics, from the naive formula to our own kernels inside the model.

A point is a comparison: its `variants` are measured against each other in one process. Variants
that compile take seconds per shape, so `only_at` may limit the shapes they run at.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.grids import SHAPES, combinations
from lmlab.study.points import Point, crossed

SAMPLING = ("samples", "variant_cap_s")
Block = Mapping[str, Any]
Parameters = dict[str, Any]


def points(study: Study, block: Block) -> list[Point]:
    """The points of every topic that the block names, in their order."""
    seed = _only(study.common, "seed")
    return [
        Point("attention", {"topic": topic, **parameters}, {**settings, **seed})
        for topic in block["topics"]
        for parameters, settings in TOPICS[topic](study, block, block[topic])
    ]


Topic = Iterable[tuple[Parameters, dict[str, Any]]]
"""Parameters and settings of each point."""


def _naive(study: Study, block: Block, asked: Block) -> Topic:
    shapes = crossed(head_dim=asked["head_dims"], sequence=asked["sequences"])
    settings = _only(asked, "batch", "precision", "causal", "warmup", "steps")
    settings |= _only(study.common, "time_cap_s")
    for shape in shapes + [each for each in asked["beyond"] if each not in shapes]:
        shape = _only(shape, "head_dim", "sequence")
        if variants := _variants_at(asked, precision=asked["precision"], **shape):
            yield shape, {**settings, "variants": variants}


def _benchmark(study: Study, block: Block, asked: Block) -> Topic:
    settings = {**_only(asked, "batch", *SAMPLING), "causal": True}
    shapes = crossed(head_dim=asked["head_dims"], sequence=asked["sequences"])
    for precision, shape in product(asked["precisions"], shapes):
        point = {"precision": precision, **shape}
        if variants := _variants_at(asked, **point):
            yield point, {**settings, "variants": variants}


def _shapes(study: Study, block: Block, asked: Block) -> Topic:
    keys = ("precision", "batch", "size", "context")
    for point, grid in combinations({**block, **asked}, {key: SHAPES[key] for key in keys}):
        yield point, _in_model(study, point, grid, "variants", "causal", *SAMPLING)


def _softmax(study: Study, block: Block, asked: Block) -> Topic:
    for point in crossed(size=block["sizes"], context=asked["contexts"]):
        own = _in_model(study, point, asked, "batch", "precision", *SAMPLING)
        yield point, {**own, "causal": True}


def _tiles(study: Study, block: Block, asked: Block) -> Topic:
    """The study's `block_m` and `block_n` are for the forward pass. Backward swaps them, so that
    the resident tile of a program (there of keys) takes the same sizes."""
    shared = _only(asked, "batch", "heads", "sequences", "precision", "stages", *SAMPLING)
    forward = [[held, streamed] for held, streamed in product(asked["block_m"], asked["block_n"])]
    tiles = {"forward": forward, "backward": [[streamed, held] for held, streamed in forward]}
    for point in crossed(head_dim=asked["head_dims"], direction=tiles):
        own = {"tiles": tiles[point["direction"]], "attention": "flash", "causal": True}
        yield point, {**shared, **own}


def _leaderboard(study: Study, block: Block, asked: Block) -> Topic:
    keys = ("batch", "heads", "sequence", "precision", "variants", *SAMPLING)
    sustained = {f"sustained_{key}": each for key, each in asked["sustained"].items()}
    for point in crossed(head_dim=asked["head_dims"]):
        yield point, {**_only(asked, *keys), **sustained, "causal": True}


def _model(study: Study, block: Block, asked: Block) -> Topic:
    shared = {**_only(asked, "precision", "variants"), "attention": asked["variants"][0]}
    for point in crossed(size=block["sizes"], context=asked["contexts"]):
        yield {**point, **study.own_model()}, {**_training(study, point, asked), **shared}


def _model_compile(study: Study, block: Block, asked: Block) -> Topic:
    grids = ({**block, **asked}, *asked["more"])
    pairs = (pair for grid in grids for pair in product(grid["precisions"], grid["sizes"]))
    for precision, size in dict.fromkeys(pairs):
        point = {"size": size, **_only(asked, "context"), "precision": precision}
        attention = _only(study.common, "attention")
        yield {**point, **study.own_model()}, {**_training(study, point, asked), **attention}


TOPICS: dict[str, Callable[[Study, Block, Block], Topic]] = {
    "naive": _naive,
    "softmax": _softmax,
    "model_compile": _model_compile,
    "benchmark": _benchmark,
    "shapes": _shapes,
    "tiles": _tiles,
    "leaderboard": _leaderboard,
    "model": _model,
}


def _in_model(study: Study, point: Parameters, asked: Block, *keys: str) -> dict[str, Any]:
    """Settings of attention on its own, in the shape it has in a model of this size."""
    return {**asdict(study.sizes[point["size"]]), **_only(asked, *keys)}


def _training(study: Study, point: Parameters, asked: Block) -> dict[str, Any]:
    own = {**_only(asked, "batch", "warmup", "steps"), **_only(study.common, "time_cap_s")}
    return {**study.size_settings(point["size"]), **own, "mode": "train_step"}


def _variants_at(asked: Block, **point: int | str) -> list[str]:
    def runs(name: str) -> bool:
        groups = asked.get("only_at", {}).get(name, [{}])
        return any(
            all(value in group.get(f"{key}s", [value]) for key, value in point.items())
            for group in groups
        )

    return [name for name in asked["variants"] if runs(name)]


def _only(asked: Block, *keys: str) -> dict[str, Any]:
    return {key: asked[key] for key in keys}
