"""Memory: a grid of size, context and precision; then long contexts, one block, checkpointing.

A grid point measures all modes, one after the other in one process. `long_context` is the same grid
at batch 1, for contexts that larger batches cannot reach; those that still do not fit are recorded
as out of memory. `block` examines a single block. Checkpointing has one point per size and context,
with strategies as its variants, because times are comparable only within a process.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point

Block = Mapping[str, Any]


def points(study: Study, block: Block) -> list[Point]:
    """The grid first, then long contexts, one block, and checkpointing."""
    skip, keep = study.common["skip_if_too_large"], block["keep_snapshots"]
    recorded = {"skip_if_too_large": skip, "keep_snapshots": keep}
    shared = {"precisions": block["precisions"]}
    long, inner = ({**shared, **block[key]} for key in ("long_context", "block"))
    return [
        *_grid(study, "timeline", block, recorded),
        *_grid(study, "long_context", {**long, "batch": 1}, recorded),
        *_grid(study, "block", inner, {"compile": inner["compile"]}),
        *_checkpointing(study, block["checkpointing"]),
    ]


def _grid(study: Study, topic: str, block: Block, settings: Block) -> Iterator[Point]:
    axes = (block[axis] for axis in ("sizes", "contexts", "precisions"))
    for size, context, precision in product(*axes):
        parameters = {
            "topic": topic,
            "size": size,
            "context": context,
            "batch": block["batch"],
            **study.own_model(),
            "attention": study.common["attention"],
            "precision": precision,
        }
        yield Point("memory", parameters, {**study.size_settings(size), **settings})


def _checkpointing(study: Study, block: Block) -> Iterator[Point]:
    """One point per size and context, with the strategies whose segments divide its blocks."""
    for point in _grid(study, "checkpointing", {**block, "precisions": [block["precision"]]}, {}):
        layers = point.settings["num_layers"]
        names = [name for name in block["strategies"] if layers % _segment(name) == 0]
        own = {"strategies": ",".join(names), "time_cap_s": study.common["time_cap_s"]}
        own |= {key: block[key] for key in ("rounds", "steps")}
        yield Point("memory", point.parameters, {**point.settings, **own})


def _segment(strategy: str) -> int:
    """Blocks per segment of `every-K`; 1 for the other strategies, which suit any depth."""
    return int(strategy.removeprefix("every-")) if strategy.startswith("every-") else 1
