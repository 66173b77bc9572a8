"""Collectives are right before they are timed, and a case without a time says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.chapters.collectives import measure as collectives
from lmlab.chapters.collectives.measure import (
    MIB,
    MIN_SAMPLES,
    Case,
    divisible,
    expectation,
    headline,
    in_order,
    measure,
    no_time,
)
from lmlab.jobs import rank_clock
from lmlab.jobs.rank_clock import gather_floats, largest, time_on_all_ranks
from lmlab.study.points import Point

FOUR = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def collectives_point(**changes: Any) -> Point:
    parameters = {"placement": "cpu", "world_size": 1}
    settings = {
        **{"nnodes": 1, "time_cap_s": 20.0, "seed": 0},
        **{"operations": FOUR, "dtypes": ["fp32", "bf16"], "sizes_mib": [1]},
    }
    return Point(
        "collectives",
        {key: changes.get(key, value) for key, value in parameters.items()},
        {key: changes.get(key, value) for key, value in settings.items()},
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group with this process as its only rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_first_operation_goes_ahead_of_the_others_but_not_of_their_small_sizes() -> None:
    point = collectives_point(sizes_mib=[1024, 1, 16, 64], dtypes=["fp32"], operations=FOUR[:2])
    order = [(case.operation, case.size_bytes // MIB) for case in in_order(point, 2)]
    ahead = [("all_reduce", 1), ("all_reduce", 16), ("all_gather", 1), ("all_reduce", 64)]
    assert order == [
        *ahead,
        *[("all_gather", 16), ("all_reduce", 1024), ("all_gather", 64), ("all_gather", 1024)],
    ]


@pytest.mark.parametrize(
    ("size", "world_size", "item", "cut"),
    [(MIB, 1, 4, MIB), (MIB, 8, 4, MIB), (MIB, 6, 4, 1_048_560), (MIB, 6, 2, 1_048_572)],
)
def test_every_rank_gets_an_equal_whole_part(
    size: int, world_size: int, item: int, cut: int
) -> None:
    assert divisible(size, world_size, item) == cut
    assert cut % (world_size * item) == 0


def test_what_each_operation_must_give_on_two_ranks() -> None:
    first = {name: expectation(name, 2).tolist() for name in FOUR}
    assert first["all_reduce"] == [1.5] * 48
    assert first["all_gather"] == [1.0] * 24 + [2.0] * 24
    assert first["reduce_scatter"] == [1.5] * 24
    assert first["broadcast"] == [1.0] * 48


def test_every_operation_size_and_format_is_a_case(alone: None, cpu: torch.device) -> None:
    outcome = measure(collectives_point(), cpu)
    rows = outcome.data["cases"]
    assert [(row["operation"], row["dtype"]) for row in rows] == [
        (operation, dtype) for operation in FOUR for dtype in ("fp32", "bf16")
    ]
    for row in rows:
        assert row["size_bytes"] == MIB
        assert MIN_SAMPLES <= row["n"] == len(row["samples_ms"])
        assert len(row["rank_median_ms"]) == 1
    assert list(outcome.measurements) == ["all_reduce fp32 1 MiB"]


def test_a_wrong_operation_gets_no_time(
    alone: None, cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(whole: Tensor, part: Tensor) -> Any:
        return lambda: torch.zeros_like(whole)

    monkeypatch.setitem(collectives.OPERATIONS, "broadcast", forgetful)
    with pytest.raises(RuntimeError, match=r"broadcast of fp32 on 1 ranks gives \[0\.0"):
        measure(collectives_point(), cpu)


def test_an_operation_that_the_backend_refuses_says_so_in_its_rows(
    alone: None, cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(whole: Tensor, part: Tensor) -> Any:
        raise RuntimeError("gloo has no\nreduce_scatter")

    monkeypatch.setitem(collectives.OPERATIONS, "reduce_scatter", refused)
    rows = measure(collectives_point(dtypes=["fp32"]), cpu).data["cases"]
    reasons = {row["operation"]: row.get("reason") for row in rows}
    assert reasons["reduce_scatter"] == "gloo has no reduce_scatter"
    assert reasons["all_reduce"] is None


def test_cases_after_the_time_is_up_are_not_begun(alone: None, cpu: torch.device) -> None:
    rows = measure(collectives_point(time_cap_s=1e-9), cpu).data["cases"]
    assert {row["reason"] for row in rows} == {"the job's time was up"}
    assert headline(rows, collectives_point()) == {}


def test_a_case_too_long_for_what_is_left_is_not_begun(alone: None, cpu: torch.device) -> None:
    job = collectives.Job(cpu, time_cap_s=10.0)
    job.take(Case("all_reduce", "fp32", 4096), cases_left=1)
    row = job.take(Case("all_reduce", "fp32", 2**60), cases_left=1)
    assert row["reason"].startswith("3 repetitions take about ")
    assert "samples_ms" not in row
    assert no_time(2.5, 1.0) == "3 repetitions take about 3 s, 2.5 s were left"
    assert no_time(2.0, 0.5) == "5 repetitions take about 2.5 s, 2 s were left"


def test_the_headline_is_the_largest_case_of_the_first_operation() -> None:
    times = {"samples_ms": [2.0], "clock": "host", "cache": "warm", "stopped": "1 sample"}
    rows = [
        Case("all_reduce", "fp32", MIB).row(**times),
        Case("all_reduce", "fp32", 4 * MIB).row(**times),
        Case("all_reduce", "fp32", 16 * MIB).row(reason="no time"),
        Case("all_gather", "fp32", 64 * MIB).row(**times),
    ]
    assert list(headline(rows, collectives_point())) == ["all_reduce fp32 4 MiB"]


def test_ranks_tell_each_other_their_numbers(alone: None, cpu: torch.device) -> None:
    assert gather_floats([1.5, 2.5], cpu) == [[1.5, 2.5]]
    assert largest(3.0, cpu) == 3.0


@pytest.mark.parametrize(
    ("deviation", "cap_s", "n", "stopped"),
    [
        (100.0, 60.0, 3, "relative deviation"),
        (0.0, 60.0, 7, "sample cap of 7"),
        (0.0, 1e-9, 3, "time cap of 1e-09 s after 3 samples"),
    ],
    ids=["settled", "enough", "too slow"],
)
def test_repetitions_end_when_settled_or_capped_but_never_below_the_fewest(
    alone: None,
    cpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    deviation: float,
    cap_s: float,
    n: int,
    stopped: str,
) -> None:
    monkeypatch.setattr(rank_clock, "QUICK_S", 0.0)  # one repetition at a time
    calls: list[int] = []

    def run() -> Tensor:
        calls.append(1)
        return torch.empty(0)

    times = time_on_all_ranks(
        run,
        device=cpu,
        warmup=1,
        min_samples=3,
        max_samples=7,
        target_relative_deviation=deviation,
        time_cap_s=cap_s,
    )
    assert len(calls) == len(times.slowest.samples_ms) + 1
    assert times.slowest.stopped.startswith(stopped)
    assert n <= len(times.slowest.samples_ms) <= 7
