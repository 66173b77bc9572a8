"""Six principles: one point each, whose variants are measured against each other."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    shared = {key: block[key] for key in ("samples", "variant_cap_s")}
    shared["seed"] = study.common["seed"]
    return [
        Point("principles", {"topic": topic}, {**block[topic], **shared})
        for topic in block["topics"]
    ]
