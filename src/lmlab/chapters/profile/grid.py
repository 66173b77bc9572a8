"""Profile: one point per shape and precision, all modes in one process; `more` as in end to end."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.grids import SHAPES, combinations
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    common = {key: study.common[key] for key in ("time_cap_s", "skip_if_too_large")}
    own = {key: block[key] for key in ("warmup", "steps", "profiler", "keep_traces")}
    model = {**study.own_model(), "attention": study.common["attention"]}
    return [
        Point("profile", {**each, **model}, {**study.size_settings(each["size"]), **own, **common})
        for each, _ in combinations(block, SHAPES)
    ]
