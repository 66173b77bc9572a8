"""Calculations: a model too large for any machine at hand, worked out on paper. One point."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The block of the study, flattened into the point's settings."""
    settings = {
        **block["blocks"],
        "gpu_memory_gb": block["gpu_memory_gb"],
        "tokens": block["tokens"],
        **{f"device_{key}": value for key, value in block["device"].items()},
        **block["mesh"],
        "ranks": block["ranks"],
        "scheme_tokens": block["scheme_tokens"],
    }
    return [Point("calculations", {}, settings)]
