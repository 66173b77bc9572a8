"""A small study written to disk, with chosen times, for tests of the report."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlab.measure.records import Record, timed, value, without_value
from lmlab.measure.statistics import Measurement
from lmlab.report.frame import Results, load
from lmlab.study.points import Point
from lmlab.study.results import Result

MACHINE = "test-gpu"


def time_record(samples: Sequence[float], clock: Any = "wall", **labels: Any) -> Record:
    measurement = Measurement(
        samples_ms=tuple(samples), clock=clock, cache="warm", stopped=f"{len(samples)} samples"
    )
    return timed(measurement, **labels)


def result(parameters: Mapping[str, Any], records: Iterable[Record] = (), **changes: Any) -> Result:
    """A result of the test machine, with `changes` to its fields."""
    values: dict[str, Any] = {
        "chapter": "steps",
        "settings": {"num_layers": 2},
        "status": "ok",
        "machine": {"id": MACHINE, "device": "cuda", "name": "Test GPU"},
        "versions": {"python": "3.12", "torch": "2.11.0", "lmlab": "0.2.0"},
        "commit": {"id": "a" * 40, "dirty": False},
        "code_fingerprint": "0" * 16,
        "started_at": "2026-01-01T00:00:00Z",
        "elapsed_s": 1.0,
    }
    return Result(parameters=parameters, measurements=tuple(records), **{**values, **changes})


def machine_card(dtype: str, measured: float, stated: float, bandwidth: float) -> Result:
    """The ceilings that pages of other chapters quote."""
    records = [
        value("matmul_rate", measured, "TFLOP/s", dtype=dtype),
        value("stated_matmul_rate", stated, "TFLOP/s", dtype=dtype),
        value("copy_bandwidth", bandwidth, "GB/s"),
    ]
    return result({}, records, chapter="machine")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a result in its file, as if it had been measured another day."""
    values = json.loads(path.read_text())
    values["started_at"] = "2026-12-24T00:00:00Z"
    change(values)
    path.write_text(json.dumps(values))


def scale(measurements: Iterable[Record], factor: float) -> None:
    """Multiply all times, as if the machine were slower."""
    for record in measurements:
        if "samples" in record:
            for name in ("value", "q1", "q3", "min", "max", "mean"):
                record[name] *= factor
            record["samples"] = [sample * factor for sample in record["samples"]]


def written(folder: Path, results: Iterable[Result], missing: Iterable[Point] = ()) -> Results:
    """Write results to a folder and load them again, with `missing` points that have none."""
    points = []
    for each in results:
        point = Point(each.chapter, each.parameters, each.settings)
        each.write(point.path(folder, MACHINE))
        points.append(point)
    return load([*points, *missing], folder, MACHINE)


def small_study(folder: Path) -> Results:
    """Two sizes and two precisions; the largest ran out of memory, one point is missing."""
    times = {
        ("small", "fp32"): [10.0, 10.1, 9.9],
        ("small", "bf16"): [5.0, 5.1, 4.9],
        ("large", "fp32"): [100.0, 100.5, 99.5],
    }
    results = [
        result(
            {"size": size, "precision": precision},
            [
                time_record(samples, phase="total"),
                value("peak_memory", 2**30, "B"),
                without_value("time", "unsupported", "needs two GPUs", phase="exchange"),
            ],
        )
        for (size, precision), samples in times.items()
    ]
    results.append(
        result({"size": "large", "precision": "bf16"}, status="oom", reason="asked for 40 GiB")
    )
    return written(folder, results, [Point("steps", {"size": "huge", "precision": "fp32"}, {})])


def group(world_size: int, *, gpus: int = 0, nnodes: int = 1) -> dict[str, Any]:
    """`data` of a result, with the description of a process group."""
    return {
        "ranks": {
            "backend": "nccl" if gpus == world_size else "gloo",
            "world_size": world_size,
            "device": "cuda" if gpus else "cpu",
            "gpus": gpus,
            "nnodes": nnodes,
            "threads": 1,
        }
    }


def two_groups(
    folder: Path, chapter: str, on_cpu: Sequence[Record], on_gpus: Sequence[Record] | None, *,
    cpu_ranks: int = 2, parameters: Mapping[str, Any] = {}, data: Mapping[str, Any] = {}, **more:
    Any,
) -> Results:  # fmt: skip
    """A group of CPU ranks and one of two GPUs; the latter was refused if it has no records."""
    cpu = {"placement": "cpu", "world_size": cpu_ranks, **parameters}
    gpus = {"placement": "own_gpu", "world_size": 2, **parameters}
    refused = {"status": "unsupported", "reason": "needs 2 GPUs, 1 found"}
    outcome = refused if on_gpus is None else {"data": {**group(2, gpus=2), **data}}
    results = [
        result(cpu, on_cpu, chapter=chapter, data={**group(cpu_ranks), **data}, **more),
        result(gpus, on_gpus or (), chapter=chapter, **outcome, **more),
    ]
    return written(folder / chapter, results)
