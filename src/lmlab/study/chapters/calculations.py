"""Calculations: a model too large for any machine at hand, worked out on paper. One point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The block is the question."""
    keys = ("blocks", "gpu_memory_gb", "tokens", "device", "mesh", "ranks")
    return [Point("calculations", {}, {key: block[key] for key in keys})]
