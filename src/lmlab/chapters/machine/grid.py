"""The machine card: what the machine is, and the ceilings it reaches. One point."""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """One card per machine; `quick` measures ceilings on small shapes."""
    return [Point("machine", {}, {"quick": block["quick"], "seed": study.common["seed"]})]
