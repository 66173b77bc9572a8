"""The memory chapter of a small study that a test has altered."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pandas as pd

from lmlab.study.config import Study, load
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import memory as frames
from tests.writeup import factory, synthetic_memory

GIB = 2**30
A_STEP = factory.measurement([1188.0, 1200.0, 1200.0, 1212.0])
"""Of a strategy that a test makes fit."""

Change = Callable[[Point, dict[str, Any]], None]


def study(device: str = "cuda", **block: Any) -> Study:
    values = factory.config()
    for blocks in values["studies"].values():
        blocks["memory"].update(block)
    return load(values, device)


SMALL = {"sizes": ["small", "medium"], "contexts": [128, 256]}


def collected(change: Change | None = None, device: str = "cuda", **block: Any) -> Collected:
    """Two sizes at two contexts; `change` edits the data of a point before it is a result."""

    def make(point: Point, device: str) -> Result | None:
        result = synthetic_memory.memory(point, device)
        data = deepcopy(dict(result.data))
        if change is not None:
            change(point, data)
        if data.get("missing"):
            return None
        times = {
            arm["name"]: result.measurements.get(arm["name"], A_STEP)
            for arm in data.get("arms", ())
            if arm["status"] == "ok"
        }
        return factory.result(point, device, data=data, measurements=times)

    return factory.collected("memory", make, device, what=study(device, **{**SMALL, **block}))


def nothing(point: Point, data: dict[str, Any]) -> None:
    data["missing"] = True


def peaks(heights: Callable[[Point, str], float]) -> Change:
    """Sets each mode's peak in GiB."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for name, mode in data.get("modes", {}).items():
            mode["max_memory_allocated_bytes"] = int(heights(point, name) * GIB)

    return change


def data_of(change: Change | None = None, device: str = "cuda", **block: Any) -> pd.DataFrame:
    return frames.frame(collected(change, device, **block))


def low(point: Point) -> bool:
    return point.parameters["precision"] == "bf16"


def context(point: Point) -> int:
    return int(point.parameters["context"])
