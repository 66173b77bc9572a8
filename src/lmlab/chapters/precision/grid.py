"""Precision: four small experiments on what number formats keep and lose."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """Formats, accumulation, the types that autocast chooses, what LayerNorm is sensitive to."""
    seed, term = {"seed": study.common["seed"]}, {"term": block["term"]}
    asked = [
        ({"topic": "accumulation"}, {"terms": block["terms"], **term, **seed}),
        *(({"topic": "autocast", "dtype": dtype}, seed) for dtype in block["dtypes"]),
        ({"topic": "formats"}, term),
        ({"topic": "layernorm"}, seed),
    ]
    return [Point("precision", parameters, settings) for parameters, settings in asked]
