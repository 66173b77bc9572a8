"""FSDP next to data parallelism and PyTorch's own `fully_shard`.

Values come from the block `fsdp` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point
from lmlab.study.rank_points import rank_points


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """One point per placement and world size."""
    return rank_points("fsdp", study, block, ("bucket_mb",))
