"""Memory: every size, context and precision, largest size first; then what else is asked.

A point of the grid measures all modes, one after the other in one process. `long_context` is the
same grid with one sequence, at contexts that a batch of several does not reach; what does not fit
either is recorded as out of memory. `block` looks into one block. Checkpointing is a point per size
and context whose variants are the strategies, because times are comparable only inside one process.
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
    """Only strategies whose segments divide a size's blocks."""
    for point in _grid(study, "checkpointing", {**block, "precisions": [block["precision"]]}, {}):
        layers = point.settings["num_layers"]
        names = [name for name in block["strategies"] if layers % _segment(name) == 0]
        own = {"strategies": ",".join(names), "time_cap_s": study.common["time_cap_s"]}
        own |= {key: block[key] for key in ("rounds", "steps")}
        yield Point("memory", point.parameters, {**point.settings, **own})


def _segment(strategy: str) -> int:
    """Blocks in a segment of `every-K`; the other strategies have none of their own."""
    return int(strategy.removeprefix("every-")) if strategy.startswith("every-") else 1
