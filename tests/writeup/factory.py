"""Results as a machine would leave them, built from the few numbers that a test is about.

Nothing is random: the samples of a phase are a fixed wave around its time, so that every statistic
is known and none is zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from lmlab.study.chapters import points_of
from lmlab.study.config import Study, load
from lmlab.study.files import REFERENCES, ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row

MACHINES = {
    "cuda": {"id": "nvidia-h200", "device": "cuda", "name": "NVIDIA H200"},
    "cpu": {"id": "cpu-test", "device": "cpu", "name": "Test Processor 2 @ 2.0 GHz"},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Maker = Callable[[Point, str], Result | None]


def config(**changes: Any) -> dict[str, Any]:
    """The repository's config.yaml with changed top-level keys."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    return {**deepcopy(values), **changes}


def study(device: str = "cuda", **block: Any) -> Study:
    """The study of a device, with some keys of its end-to-end block replaced."""
    values = config()
    for blocks in values["studies"].values():
        blocks["end_to_end"].update(block)
    return load(values, device)


def measurement(samples: Sequence[float], **changes: Any) -> dict[str, Any]:
    """A measurement as a result file holds it, its statistics computed from the samples."""
    several = len(samples) > 1
    q1, median, q3 = (
        statistics.quantiles(samples, n=4, method="inclusive") if several else [samples[0]] * 3
    )
    return {
        "clock": "host",
        "cache": "warm",
        "stopped": f"{len(samples)} samples",
        "samples_ms": list(samples),
        "n": len(samples),
        "median_ms": median,
        "q1_ms": q1,
        "q3_ms": q3,
        "min_ms": min(samples),
        "max_ms": max(samples),
        "mean_ms": statistics.fmean(samples),
        "sd_ms": statistics.stdev(samples) if several else None,
        "noisy": q3 - q1 > 0.1 * median,
        **changes,
    }


def result(point: Point, device: str = "cuda", **changes: Any) -> Result:
    """A valid result of a point."""
    versions = {"python": "3.12.3", "torch": "2.13.0", "lmlab": "0.1.0", "cuda": "13.0"}
    values: dict[str, Any] = {
        "chapter": point.chapter,
        "parameters": dict(point.parameters),
        "settings": dict(point.settings),
        "status": "ok",
        "machine": MACHINES[device],
        "versions": {**versions, "cuda": "13.0" if device == "cuda" else None},
        "commit": {"id": COMMIT, "dirty": False},
        "code_fingerprint": "0123456789abcdef",
        "started_at": "2026-01-01T00:00:00Z",
        "elapsed_s": 1.5,
        **changes,
    }
    return Result(**values)


def step(
    point: Point,
    device: str = "cuda",
    *,
    spread: float = 0.004,
    cold: Mapping[str, Sequence[float]] | None = None,
    busy_ms: Mapping[str, float] | None = None,
    flops: Mapping[str, int] | None = None,
    data: Mapping[str, Any] | None = None,
    **phases_ms: float,
) -> Result:
    """An end-to-end result from the time of each phase; `cold` slows a process's first steps."""
    warmups, steps = int(point.parameters["warmup"]), point.settings["steps"]
    traces = {
        phase: _trace(ms, warmups + steps, spread, (cold or {}).get(phase, ()))
        for phase, ms in phases_ms.items()
    }
    traces["total"] = [sum(parts) for parts in zip(*traces.values(), strict=True)]
    work = flops or dict.fromkeys(phases_ms, 10**9)
    return result(
        point,
        device,
        measurements={name: measurement(trace[warmups:]) for name, trace in traces.items()},
        data={
            "warmup_samples_ms": {name: trace[:warmups] for name, trace in traces.items()},
            "tokens_per_step": point.parameters["context"] * point.parameters["batch"],
            "flops": {phase: {"matmul": count, "other": 10} for phase, count in work.items()},
            "flop_convention": "full",
            "parameters_total": point.settings["d_model"] ** 2 * point.settings["num_layers"],
            "parameters_bytes": 4,
            "gpu_busy_ms": busy_ms,
            "tf32": False,
            "threads": 2,
            "peak_memory_bytes": None,
            "init_s": 0.5,
            **(data or {}),
        },
    )


def _trace(ms: float, count: int, spread: float, slow: Sequence[float]) -> list[float]:
    factors = [*slow, *[1.0] * count]
    return [ms * factors[i] * (1 + spread * math.sin(1.7 * i + 0.3)) for i in range(count)]


def failed(point: Point, status: str, reason: str, device: str = "cuda") -> Result:
    """A result without numbers."""
    return result(point, device, status=status, reason=reason)


def collected(
    chapter: str,
    make: Maker,
    device: str = "cuda",
    *,
    card: Result | None = None,
    what: Study | None = None,
    beside: Mapping[str, Maker] | None = None,
) -> Collected:
    """A chapter as the writeup sees it; a point for which `make` gives None was not measured."""
    what = what or study(device)
    machine = MACHINES[device]["id"]

    def rows(name: str, maker: Maker) -> list[Row]:
        return [
            Row(point, point.path(Path("results"), machine).as_posix(), maker(point, device))
            for point in points_of(what, name)
        ]

    others = {name: rows(name, maker) for name, maker in (beside or {}).items()}
    return Collected(chapter, machine, device, what, rows(chapter, make), card, REFERENCES, others)
