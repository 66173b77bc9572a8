"""Precision: four small experiments on what number formats keep and lose."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """Formats, accumulation, the types that autocast chooses, what LayerNorm is sensitive to."""
    seed = {"seed": study.common["seed"]}
    formats = Point("precision", {"topic": "formats"}, {"term": block["term"]})
    accumulation = Point(
        "precision",
        {"topic": "accumulation"},
        {"terms": block["terms"], "term": block["term"], **seed},
    )
    autocast = [
        Point("precision", {"topic": "autocast", "dtype": dtype}, seed) for dtype in block["dtypes"]
    ]
    return [accumulation, *autocast, formats, Point("precision", {"topic": "layernorm"}, seed)]
