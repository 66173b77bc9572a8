"""Two sizes at two contexts, each step taking what a test says: enough for every sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames.end_to_end import PHASES_OF_MODE, frame
from tests.writeup import factory

COLD = {"context": 128, "batch": 4, "precision": "fp32", "mode": "train_step"}
STUDY = factory.study(
    "cuda",
    sizes=["small", "medium"],
    contexts=[128, 256],
    modes=["forward", "train_step"],
    cold_start={**COLD, "warmups": [0, 1, 5]},
)
STEP = {"forward": 10.0, "backward": 20.0, "optimizer": 2.0}
Times = Callable[[Point], dict[str, Any] | None]


def data_of(times: Times, device: str = "cuda") -> pd.DataFrame:
    return frame(collected_of(times, device))


def collected_of(times: Times, device: str = "cuda") -> Collected:
    """A small study whose points take what `times` says; None leaves a point out."""

    def make(point: Point, device: str) -> Result | None:
        wanted = times(point)
        if wanted is None:
            return None
        return factory.step(point, device, **in_mode(wanted, str(point.parameters["mode"])))

    return factory.collected("end_to_end", make, device, what=STUDY)


def in_mode(wanted: dict[str, Any], mode: str) -> dict[str, Any]:
    """What is left of a step in a mode with fewer phases."""
    absent = set(STEP) - set(PHASES_OF_MODE[mode])
    kept = {key: value for key, value in wanted.items() if key not in absent}
    if kept.get("busy_ms"):
        kept["busy_ms"] = {p: ms for p, ms in kept["busy_ms"].items() if p not in absent}
    return kept


def nothing(point: Point) -> None:
    return None
