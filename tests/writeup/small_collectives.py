"""The synthetic study of collectives, and changes to its cases."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import collectives as frames
from tests.writeup import factory, synthetic
from tests.writeup.synthetic_ranks import collectives as make_result
from tests.writeup.synthetic_ranks import milliseconds

Change = Callable[[Point, dict[str, Any]], None]
Times = Callable[[float], list[float]]
SOUND = synthetic.collected("collectives")
JOB_TIME = f"{SOUND.rows[0].point.settings['time_cap_s']:g} s"
EMPTY = factory.collected("collectives", lambda point, device: None)


def changed(change: Change, *, gpus: int = 1, device: str = "cuda") -> Collected:
    """The synthetic study after a change to the data of each job."""

    def make(point: Point, device: str) -> Result:
        result = make_result(point, device, gpus=gpus)
        if result.status != "ok":
            return result
        data = deepcopy(dict(result.data))
        change(point, data)
        return factory.result(point, device, data=data)

    return synthetic.collected("collectives", device, make)


def only(*placements: str, worlds: set[int] | None = None) -> Collected:
    """The study with jobs of these placements alone."""

    def make(point: Point, device: str) -> Result | None:
        p = point.parameters
        if p["placement"] not in placements or (worlds and p["world_size"] not in worlds):
            return None
        return make_result(point, device, gpus=8)

    return synthetic.collected("collectives", make=make)


def scaled(factor: float, **where: Any) -> Change:
    """Cases with these values take so many times as long."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for case in data["cases"]:
            if "samples_ms" in case and where.items() <= case.items():
                case.update(factory.measurement([factor * ms for ms in case["samples_ms"]]))

    return change


def sampled(times: Times, **where: Any) -> Change:
    """Cases with these values have the samples that `times` makes of their median."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for case in data["cases"]:
            if "samples_ms" in case and where.items() <= case.items():
                case.update(factory.measurement(times(case["median_ms"])))

    return change


def few(median: float) -> list[float]:
    """Three samples close together."""
    return [0.99 * median, median, 1.02 * median]


def noisy(median: float) -> list[float]:
    """Samples whose middle half is wide."""
    return [0.8 * median, 0.9 * median, median, 1.1 * median, 1.5 * median]


def cut_from(mib: int, reason: str = "the job's time was up") -> Change:
    """Every case from a size on was not begun, in every format and operation."""

    def change(point: Point, data: dict[str, Any]) -> None:
        data["cases"] = [
            {**{key: case[key] for key in ("operation", "dtype", "size_bytes")}, "reason": reason}
            if frames.nominal_mib(case["size_bytes"]) >= mib
            else case
            for case in data["cases"]
        ]

    return change


def whole(point: Point, data: dict[str, Any]) -> None:
    """A job that had time for every case."""
    placement, ranks = str(point.parameters["placement"]), int(point.parameters["world_size"])
    data["cases"] = [
        timed_case(placement, ranks, case["operation"], case["dtype"], case["size_bytes"])
        for case in data["cases"]
    ]


def timed_case(placement: str, ranks: int, operation: str, dtype: str, size: int) -> dict[str, Any]:
    """A case of the synthetic machine that no cap keeps from being timed."""
    samples = [milliseconds(placement, ranks, operation, size) * (1 + i / 100) for i in range(5)]
    return {
        "operation": operation,
        "dtype": dtype,
        "size_bytes": size,
        **factory.measurement(samples),
        "rank_median_ms": [samples[2]] * ranks,
    }
