"""Pages of the chapters on several ranks: what they compute, and that every branch renders."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.chapters.data_parallel import page as data_parallel
from lmlab.chapters.rank_page import CATEGORIES, describe
from lmlab.jobs import memory_stages, rank_work
from lmlab.jobs.memory_stages import Training, memory_records, two_steps
from lmlab.jobs.rank_work import per_rank
from lmlab.measure import across_ranks
from lmlab.measure.records import Record, value, without_value
from lmlab.measure.statistics import Measurement
from lmlab.report.frame import Results
from lmlab.report.page import Chapter
from tests.chapters.pages import built, rendered
from tests.report.study import group, time_record, two_groups

CHAPTERS = ("data_parallel", "sharded_optimizer", "fsdp")
MIB = 2**20
SHAPE = {"context": 8, "batch": 2, "precision": "fp32"}
SETTINGS = {"step_limit_s": 2.0, "rounds": 4, "torch_bucket_mb": 25.0, "bucket_mb": 25.0}


def common(*purposes: str) -> list[Record]:
    records = [value("optimizer", "torch.optim.AdamW", ""), value("gradient_bytes", 4 * MIB, "B")]
    for purpose in purposes:
        records += [
            value("size", "small", "", purpose=purpose),
            without_value("size", "unsupported", "too large", purpose=purpose, candidate="xl"),
        ]
    return records


def step_records(variant: str, samples: list[float], phase: str = "total") -> list[Record]:
    labels = {"variant": variant, "phase": phase}
    ranks = [
        time_record([s - rank for s in samples], quantity="rank_time", **labels, rank=rank)
        for rank in range(2)
    ]
    busy = [time_record([1.0, 1.0], "device", **labels)] if phase == "total" else []
    return [*busy, time_record(samples, **labels), *ranks]


def test_device_time_is_that_of_the_busiest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [
        Measurement(samples_ms=own, clock="device", stopped="2 profiled steps")
        for own in ((1.0, 4.0), (3.0, 2.0))
    ]
    monkeypatch.setattr(rank_work, "device_time", lambda *_: ranks[0])
    monkeypatch.setattr(across_ranks, "gather", lambda own: [own, ranks[1]])
    (record,) = rank_work.device_time_record("flat", lambda: None, torch.device("cuda"))
    assert record["samples"] == [3.0, 4.0]
    assert (record["clock"], record["labels"]) == ("device", {"variant": "flat", "phase": "total"})


def test_peaks_are_those_of_a_step_that_begins_with_optimizer_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states: list[int] = []
    monkeypatch.setattr(
        memory_stages, "reset_peak_memory", lambda _: states.append(len(optimizer.state))
    )
    monkeypatch.setattr(memory_stages, "peak_memory_bytes", lambda _: MIB)
    work: Any = SimpleNamespace(device=x.device, tokens=x, targets=x, loss=lambda m: m(x).sum())
    found = two_steps(Training(model, optimizer), work)
    assert states == [2, 2], "a weight and a bias"
    assert found["peaks"] == {"forward_backward": MIB, "optimizer": MIB}
    first, second = found["losses"]
    assert second < first


def stages(share: float, *, peaks: bool) -> list[dict[str, Any]]:
    """Two ranks, of which the second has allocated more; everything but activations scaled."""

    def reading(rank: int) -> dict[str, Any]:
        sizes = {name: int(share * MIB) for name in CATEGORIES} | {"activations": MIB}
        return {
            "allocated_bytes": sum(sizes.values()) + rank,
            "reserved_bytes": 8 * MIB if peaks else None,
            "device_bytes": 9 * MIB,
            "device_scope": "process",
            "parts_bytes": sizes,
        }

    names = ("initialized", "after_forward", "before_step", "after_step")
    return [
        {
            "losses": [3.0, 2.0],
            "stages": dict.fromkeys(names, reading(rank)),
            "peaks": {
                "forward_backward": 20 * MIB + rank if peaks else None,
                "optimizer": 10 * MIB if peaks else None,
            },
        }
        for rank in range(2)
    ]


def expected() -> list[Record]:
    return [value("expected_memory", MIB, "B", category=name) for name in CATEGORIES[:-1]]


def ddp_records(flat: list[float]) -> list[Record]:
    times = {
        "alone": [10.0, 20.0, 10.0, 20.0],  # the machine drifts; rounds share it
        "flat": flat,
        "bucketed_1": [25.0, 50.1, 25.1, 50.0],
        "bucketed_25": [20.0, 40.1, 20.1, 40.0],
        "torch_ddp": [20.0, 41.0, 19.0, 40.0],
    }
    sent = {"alone": 0, "flat": 1, "bucketed_1": 8, "bucketed_25": 2}
    records = [record for name, samples in times.items() for record in step_records(name, samples)]
    for name, count in sent.items():
        records += [
            value("messages", count, "", variant=name),
            value("message_bytes", 8 * MIB if count else 0, "B", variant=name),
        ]
    for name in times:
        records.append(value("profiled_time", 5.0, "ms", variant=name, activity="communication"))
        records += per_rank("overlapped_share", [0.2, 0.3], "", variant=name)
    backward = time_record([6.0] * 4, phase="backward", quantity="phase_time")
    return [*records, backward, *common("time")]


def sharded_records(peaks: bool) -> list[Record]:
    records = common("memory", "time") + expected()
    for name, share in (("replicated", 1.0), ("sharded", 0.5), ("torch_zero", 0.5)):
        records += memory_records(name, stages(share, peaks=peaks))
        for phase in ("optimizer", "total"):
            records += step_records(name, [10.0 / share, 10.1 / share, 9.9 / share], phase)
    return [*records, *(value("owned_bytes", MIB, "B", rank=rank) for rank in range(2))]


def fsdp_records(peaks: bool) -> list[Record]:
    records = common("memory and time") + expected()
    records += [value("parameter_bytes", 4 * MIB, "B"), value("sharded_bytes", 4 * MIB, "B")]
    for name, share in (("ddp", 1.0), ("ddp_sharded_optimizer", 1.0), ("fsdp", 0.5)):
        records += memory_records(name, stages(share, peaks=peaks))
        records += step_records(name, [10.0 / share, 10.1 / share, 9.9 / share])
    for phase, waited in (("forward", 4.0), ("backward", 2.5)):
        records += [value("gather_wait", waited - r, "ms", phase=phase, rank=r) for r in range(2)]
    refused = without_value(
        "time", "unsupported", "no mesh", variant="torch_fully_shard", phase="total"
    )
    return [*records, refused]


def payload(chapter: str) -> dict[str, Any]:
    intervals = {"compute": [[0.0, 2.0]], "communication": [[1.0, 4.0]], "copies": []}
    names = ("flat", "bucketed_25") if chapter == "data_parallel" else ("ddp", "fsdp")
    waits = [
        {"phase": phase, "layer": layer, "ms": ms}
        for phase, layer, ms in (
            ("forward", "embedding", [0.1, 0.1]),
            ("forward", "head", [3.9, 2.9]),
            ("backward", "head", [0.0, 0.0]),  # kept since forward: not gathered again
            ("backward", "embedding", [2.5, 1.5]),
        )
    ]
    return {"intervals_ms": dict.fromkeys(names, intervals), "waits_ms": waits}


def results_of(tmp_path: Path, name: str, *, gpus: bool = False, flat: Any = None) -> Results:
    """One measured point and one that the machine cannot start, or both measured."""
    records = {
        "data_parallel": ddp_records(flat or [30.0, 60.0, 30.1, 60.1]),
        "sharded_optimizer": sharded_records(peaks=gpus),
        "fsdp": fsdp_records(peaks=gpus),
    }[name]
    return two_groups(
        tmp_path, name, records, records if gpus else None, parameters=SHAPE, settings=SETTINGS,
        data=payload(name),
    )  # fmt: skip


def chapter_of(tmp_path: Path, name: str, **options: Any) -> Chapter:
    return built(results_of(tmp_path, name, **options), name)[name]


def test_what_communication_costs_comes_from_paired_rounds(tmp_path: Path) -> None:
    chapter = chapter_of(tmp_path, "data_parallel")
    facts = chapter.facts
    shares = {row["variant"]: row["value"] for row in facts["shares"]}
    assert shares["flat"] == pytest.approx(2 / 3, rel=1e-2)
    assert shares["bucketed_25"] == pytest.approx(1 / 2, rel=1e-2)
    assert {row["verdict"] for row in facts["shares"]} == {"slower"}
    assert chapter.value(quantity="added", variant="flat") == pytest.approx(30, rel=0.02)
    assert facts["hideable"] == 6.0  # of 30 ms of communication
    assert (facts["bucket_pairs"], facts["bucket_pairs_decided"]) == (1, 1)
    against_flat = [line.split("|")[-2].strip() for line in chapter.table("front").split("\n")[4:6]]
    assert against_flat == ["1.50x", "1.51x"], "both that send during backward are faster"
    assert chapter.compare["torch"][0].verdict == "undecided"
    assert facts["sizes"] == {"size": "small", "left_out": [{"size": "xl", "reason": "too large"}]}
    assert "20 %" in chapter.table("messages")


@pytest.mark.parametrize(
    ("flat", "hideable"), [([12.0, 22.0, 12.0, 22.0], 2.0), ([11.0, 19.0, 9.0, 21.0], 0.0)]
)
def test_overlap_hides_no_more_than_all(tmp_path: Path, flat: list[float], hideable: float) -> None:
    results = results_of(tmp_path, "data_parallel", flat=flat)
    facts = built(results, "data_parallel")["data_parallel"].facts
    assert facts["hideable"] == pytest.approx(hideable)
    rendered(tmp_path, results, "data_parallel")


@settings(max_examples=25)
@given(per_byte=st.floats(1e-9, 1e-6), call=st.floats(1e-3, 1.0))
def test_the_bucket_model_recovers_its_parameters(per_byte: float, call: float) -> None:
    n, total = np.array([1.0, 200.0, 200.0, 50.0, 10.0, 2.0]), 1e9
    hide = np.array([0.0, 0.0, 100.0, 100.0, 100.0, 100.0])
    added = data_parallel.added_ms(total, n, hide, per_byte, call)
    found = data_parallel.added_ms(total, n, hide, *data_parallel.fit_model(total, n, hide, added))
    assert found == pytest.approx(added, rel=0.02, abs=0.02 * added.max())


def test_the_best_number_of_messages_balances_calls_against_overlap() -> None:
    best = data_parallel.best_messages(1e9, 100.0, 1e-5, 1.0)
    assert best == pytest.approx(10, abs=1)  # sqrt(h / c)


def test_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    facts = chapter_of(tmp_path, "sharded_optimizer", gpus=True).facts
    assert facts["ranks"] == "2 GPUs over NCCL"
    assert facts["allocated"]["replicated"] == 5 * MIB + 1
    assert facts["peak"]["sharded"]["bytes"] == 20 * MIB + 1
    assert facts["state"]["sharded"] == MIB // 2
    assert facts["expected_error"] == pytest.approx(0.5)  # the fixture also halves parameters
    assert facts["fullest_share"] == 0.5
    assert facts["sent"]["ours"] == 1.5 * facts["sent"]["plain"] == 3 * MIB


def test_waits_leave_out_the_block_that_keeps_its_weights(tmp_path: Path) -> None:
    chapter = chapter_of(tmp_path, "fsdp")
    facts = chapter.facts
    assert facts["gathers"] == 3
    assert [gather["layer"] for gather in facts["in_time"]] == ["embedding"]
    assert facts["longest_wait"]["layer"] == "head"
    assert facts["longest_wait"]["value"] == 3.9
    assert facts["waited"] == 6.5
    assert facts["expected_error"] == pytest.approx(0.0)
    assert chapter.value(quantity="versus_ddp", variant="fsdp") == pytest.approx(0.5)


@pytest.mark.parametrize("name", CHAPTERS)
@pytest.mark.parametrize("gpus", [False, True])
def test_pages_render(tmp_path: Path, name: str, gpus: bool) -> None:
    front, pages = rendered(tmp_path, results_of(tmp_path, name, gpus=gpus), name)
    assert ("needs 2 GPUs" in pages[name]) is not gpus
    assert "too large" in pages[name]
    assert (tmp_path / "out" / "figures" / name).exists()
    assert front.count("sharding and FSDP") == (name == "sharded_optimizer")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (group(8), "8 CPU ranks over gloo"),
        (group(1, gpus=1), "1 GPU over NCCL"),
        (group(4, gpus=1), "4 ranks on one GPU over gloo"),
        (group(4, gpus=1, nnodes=2), "4 ranks on one GPU per node on 2 nodes over gloo"),
    ],
)
def test_a_group_is_named_by_what_it_reported(data: dict[str, Any], name: str) -> None:
    assert describe(data["ranks"]) == name
