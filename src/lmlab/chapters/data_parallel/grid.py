"""Data parallelism: every scheme on the same ranks.

Values come from the block `data_parallel` of the study in config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point
from lmlab.study.rank_points import rank_points


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """One point per placement and world size."""
    return rank_points("data_parallel", study, block, ("bucket_sizes_mb", "torch_bucket_mb"))
