"""Collectives: correct before they are timed, a reason for every case without a time, and a page
whose bandwidths and fits follow from the times."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmlab.chapters.collectives import measure as collectives
from lmlab.chapters.collectives import page
from lmlab.chapters.collectives.measure import MIB, measure
from lmlab.measure import rounds
from lmlab.measure.records import Record, without_value
from lmlab.measure.rounds import time_on_all_ranks
from lmlab.measure.stop_rule import SamplingBudget
from lmlab.study.points import Point
from tests.chapters.pages import built, rendered
from tests.report.study import time_record, two_groups

CPU = torch.device("cpu")
FOUR = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def collectives_point(**changes: Any) -> Point:
    settings = {
        **{"nnodes": 1, "time_cap_s": 20.0, "seed": 0},
        **{"operations": FOUR, "dtypes": ["fp32", "bf16"], "sizes_mib": [1]},
        **changes,
    }
    return Point("collectives", {"placement": "cpu", "world_size": 1}, settings)


def test_the_first_operation_runs_ahead_but_not_of_small_sizes_of_the_others() -> None:
    point = collectives_point(sizes_mib=[1024, 1, 16, 64], dtypes=["fp32"], operations=FOUR[:2])
    order = [(case.operation, case.bytes // MIB) for case in collectives.ordered_cases(point, 2)]
    ahead = [("all_reduce", 1), ("all_reduce", 16), ("all_gather", 1), ("all_reduce", 64)]
    after = [("all_gather", 16), ("all_reduce", 1024), ("all_gather", 64), ("all_gather", 1024)]
    assert order == [*ahead, *after]


@given(st.integers(1, 2**30), st.integers(1, 8), st.sampled_from([2, 4]))
def test_every_rank_gets_an_equal_whole_part(size: int, world_size: int, item: int) -> None:
    cut = collectives.divisible(size, world_size, item)
    assert cut % (world_size * item) == 0
    assert 0 <= size - cut < world_size * item


def test_every_operation_dtype_and_size_is_a_record(one_rank: None) -> None:
    outcome = measure(collectives_point(), CPU)
    assert [record["labels"] for record in outcome.measurements] == [
        {"operation": operation, "dtype": dtype, "bytes": MIB}
        for operation in FOUR
        for dtype in ("fp32", "bf16")
    ]
    for record, ranks in zip(outcome.measurements, outcome.data["rank_median_ms"], strict=True):
        assert collectives.MIN_SAMPLES <= record["n"] == len(record["samples"])
        assert record["labels"] == {key: ranks[key] for key in record["labels"]}
        assert len(ranks["ms"]) == 1


def test_a_wrong_result_fails_the_point(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Mock(**{"return_value.wait.return_value": torch.zeros(24)})
    monkeypatch.setitem(collectives.OPERATIONS, "broadcast", wrong)
    with pytest.raises(RuntimeError, match="broadcast of fp32"):
        measure(collectives_point(), CPU)


@pytest.mark.usefixtures("one_rank")
def test_a_refused_operation_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=RuntimeError("gloo has no\nreduce_scatter"))
    monkeypatch.setitem(collectives.OPERATIONS, "reduce_scatter", refused)
    records = measure(collectives_point(dtypes=["fp32"]), CPU).measurements
    reasons = {record["labels"]["operation"]: record["reason"] for record in records}
    assert reasons == {**dict.fromkeys(FOUR), "reduce_scatter": "gloo has no reduce_scatter"}


def test_cases_after_the_time_is_up_have_a_reason(one_rank: None) -> None:
    outcome = measure(collectives_point(time_cap_s=1e-9), CPU)
    assert {record["status"] for record in outcome.measurements} == {"unsupported"}
    assert all(record["reason"] for record in outcome.measurements)
    assert outcome.data["rank_median_ms"] == []


@pytest.mark.parametrize(
    ("left_s", "each_s", "skipped"),
    [(2.5, 1.0, True), (3.0, 1.0, False), (2.0, 0.5, True), (2.5, 0.5, False), (0.0, 0.0, True)],
)
def test_the_fewest_repetitions_must_fit(left_s: float, each_s: float, skipped: bool) -> None:
    assert bool(collectives.why_skipped(left_s, each_s)) is skipped


@pytest.mark.parametrize(
    ("deviation", "cap_s", "n", "stopped"),
    [
        (100.0, 60.0, 3, "relative deviation"),
        (0.0, 60.0, 7, "sample cap of 7"),
        (0.0, 1e-9, 3, "time cap of 1e-09 s after 3 samples"),
    ],
    ids=["settled", "enough", "too slow"],
)
@pytest.mark.usefixtures("one_rank")
def test_repetitions_end_when_settled_or_capped_but_never_below_the_minimum(
    monkeypatch: pytest.MonkeyPatch, deviation: float, cap_s: float, n: int, stopped: str
) -> None:
    monkeypatch.setattr(rounds, "QUICK_S", 0.0)  # one repetition at a time
    run = Mock(return_value=torch.empty(0))
    limits: dict[str, Any] = {"min_samples": 3, "min_time_s": 0.0, "max_samples": 7}
    budget = SamplingBudget(**limits, target_relative_deviation=deviation, time_cap_s=cap_s)
    times = time_on_all_ranks(run, device=CPU, warmup=1, budget=budget)
    assert run.call_count == len(times.slowest.samples_ms) + 1
    assert times.slowest.stopped.startswith(stopped)
    assert n <= len(times.slowest.samples_ms) <= 7


# The page


@given(st.floats(0.01, 10), st.floats(1e3, 1e7))
def test_the_fit_recovers_latency_and_bandwidth(latency: float, per_ms: float) -> None:
    sizes = [2.0**power for power in range(20, 31, 2)]
    found = page.fit_line(sizes, [latency + size / per_ms for size in sizes])
    assert found[0] == pytest.approx(latency, rel=1e-3)
    assert found[1] == pytest.approx(per_ms, rel=1e-3)
    assert found[2] < 1e-6


def test_a_latency_is_never_negative() -> None:
    latency, per_ms, worst = page.fit_line([1e6, 2e6, 4e6], [1.0, 3.0, 7.0])
    assert latency == 0
    assert per_ms > 0
    assert worst > 0.1


def exchange(latency: float, per_ms: float, dtype: str = "fp32") -> list[Record]:
    """All-reduce times on an exact line, an all-gather of twice that; no reduce-scatter."""
    records = [
        without_value("time", "unsupported", "no time", operation="reduce_scatter", bytes=MIB)
    ]
    for size in (1, 16, 256, 1024):
        times = [latency + size * MIB / per_ms] * 3
        rounded = size * MIB - 4  # down, for some number of ranks
        records.append(time_record(times, operation="all_reduce", bytes=rounded))
    records.append(time_record([2 * ms for ms in times], operation="all_gather", bytes=rounded))
    return [{**record, "labels": {**record["labels"], "dtype": dtype}} for record in records]


@pytest.mark.parametrize("times", [(1.0, 100.0, 10.0), (10.0, 8.4, 10.0)])
def test_times_on_no_rising_line_have_no_latency(tmp_path: Path, times: tuple[float, ...]) -> None:
    records = [
        time_record([ms] * 3, operation="all_reduce", dtype="fp32", bytes=size * MIB)
        for size, ms in zip((1, 16, 256), times, strict=True)
    ]
    results = two_groups(tmp_path, "collectives", records, None, cpu_ranks=4)
    front, pages = rendered(tmp_path, results, "collectives")
    assert "takes 10.0 ms" in front
    assert "of latency" not in front
    assert "latency (ms)" not in pages["collectives"]  # an empty column is left out
    assert "| all-reduce | 9" in pages["collectives"]


@pytest.mark.parametrize("gpus", [False, True])
def test_groups_are_named_as_they_reported_and_pages_render(tmp_path: Path, gpus: bool) -> None:
    on_cpu = [*exchange(0.5, 1e6), *exchange(0.5, 5e5, "bf16")]
    on_gpus = exchange(0.02, 1e8) if gpus else None
    results = two_groups(tmp_path, "collectives", on_cpu, on_gpus, cpu_ranks=4)
    chapter = built(results, "collectives")["collectives"]
    facts = chapter.facts
    names = ["4 CPU ranks over gloo"]
    assert [g["ranks"] for g in facts["groups"]] == ["2 GPUs over NCCL"] * gpus + names
    assert [g["world_size"] for g in facts["not_started"]] == [2] * (not gpus)
    slow = facts["groups"][-1]
    assert slow["gather_ms"] == 2 * slow["ms"]
    assert slow["latency"] == pytest.approx(0.5, rel=1e-2)
    assert slow["bandwidth"] == pytest.approx(1.5, rel=1e-2)  # 1 GB/s, and 3/2 on the bus
    assert slow["size"] == "1 GiB"
    reduced = {"operation": "all_reduce", "mib": 1024, "dtype": "fp32", "ranks": names[0]}
    assert chapter.value(quantity="algbw", **reduced) == pytest.approx(1.0, rel=1e-2)
    assert len(chapter.compare["bf16"].slower) == 5
    front, pages = rendered(tmp_path, results, "collectives")
    assert "| 256 MiB |" in front
    assert "unsupported: no time" in pages["collectives"]
    assert ("needs 2 GPUs" in pages["collectives"]) is not gpus
