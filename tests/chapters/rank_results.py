"""What tests of the pages about several ranks share: results of two process groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlab.measure.records import Record
from lmlab.report.frame import Results
from tests.report.study import result, written


def group(world_size: int, *, gpus: int = 0) -> dict[str, Any]:
    """`data` with what a process group reports of itself."""
    return {
        "ranks": {
            "backend": "nccl" if gpus == world_size else "gloo",
            "world_size": world_size,
            "device": "cuda" if gpus else "cpu",
            "gpus": gpus,
            "nnodes": 1,
            "threads": 1,
        }
    }


def two_groups(
    folder: Path,
    chapter: str,
    on_cpu: Sequence[Record],
    on_gpus: Sequence[Record] | None,
    *,
    cpu_ranks: int = 2,
    parameters: Mapping[str, Any] = {},
    data: Mapping[str, Any] = {},
    **more: Any,
) -> Results:
    """A group of CPU ranks, and one of two GPUs that was measured or, without records, refused."""
    cpu = {"placement": "cpu", "world_size": cpu_ranks, **parameters}
    gpus = {"placement": "own_gpu", "world_size": 2, **parameters}
    refused = {"status": "unsupported", "reason": "needs 2 GPUs, 1 found"}
    outcome = refused if on_gpus is None else {"data": {**group(2, gpus=2), **data}}
    results = [
        result(cpu, on_cpu, chapter=chapter, data={**group(cpu_ranks), **data}, **more),
        result(gpus, on_gpus or (), chapter=chapter, **outcome, **more),
    ]
    return written(folder / chapter, results)
