"""The profile page: shares and ratios from recorded kernels, and every branch of its templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.profile import page
from lmlab.chapters.profile.trace_data import of_export
from lmlab.measure.records import value
from lmlab.report.page import Report, build_chapter
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, write_export
from tests.report.study import result, time_record, written

SHAPE: dict[str, Any] = {"size": "small", "context": 512, "batch": 4}
POINT = {**SHAPE, "precision": "fp32", "attention": "naive"}
COSTS = {"scores": 40, "scale_and_mask": 1, "softmax": 5, "output": 40}
MIB = 2**20


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A forward pass of 2.2 ms with 10 MB of scores per layer, as if nsys had recorded it."""
    export = tmp_path_factory.mktemp("export") / "export.sqlite"
    write_export(export)
    records, data = of_export(export)
    costs = [value("flops", flops * 10**6, "FLOP", part=part) for part, flops in COSTS.items()]
    costs += [value("traffic", 40 * 10**6, "B", part=part) for part in COSTS]
    wall = time_record([2.0, 2.2, 2.4], phase="forward")
    return result(POINT, [wall, *costs, *records], chapter="profile", data=data)


def machine(**facts: float) -> Result:
    return result({}, [value(name, fact, "") for name, fact in facts.items()], chapter="machine")


def facts_of(folder: Path, results: Iterable[Result]) -> Mapping[str, Any]:
    return build_chapter("profile", page, written(folder, results)).facts


def test_shares_and_ratios_follow_from_the_kernels(tmp_path: Path, profiled: Result) -> None:
    facts = facts_of(tmp_path, [profiled])
    matmul_us = 2000
    for mode, matmuls, whole in (
        ("forward", matmul_us, FORWARD_US),
        ("forward_backward", matmul_us + BACKWARD_US, FORWARD_US + BACKWARD_US),
        ("train_step", matmul_us + BACKWARD_US, FORWARD_US + BACKWARD_US + OPTIMIZER_US),
    ):
        assert facts["matmul"][mode] == pytest.approx((matmuls / whole,) * 2)
    assert (facts["backward_raises"], facts["optimizer_lowers"], facts["points"]) == (1, 1, 1)
    assert facts["clock_agrees"] == 1
    assert facts["softmax_time"]["high"]["value"] == pytest.approx(100 / 400)
    assert facts["softmax_flops"]["high"]["value"] == pytest.approx(5 / 80)
    assert facts["mask"]["high"]["value"] == pytest.approx(1)
    assert facts["pointwise"]["high"]["value"] == pytest.approx(200 / 600)
    assert facts["cores"] == {"fp32": {"tensor": 0, "SIMT": 1, "unknown": 0}}


@pytest.mark.parametrize(
    ("card", "memory"),
    [
        ({}, None),
        ({"l2_bytes": MIB}, None),
        ({"copy_bandwidth": 500.0}, None),
        ({"l2_bytes": 100 * MIB, "copy_bandwidth": 500.0}, None),
        ({"l2_bytes": MIB, "copy_bandwidth": 500.0}, {"beyond": 1, "bound": 1}),
        ({"l2_bytes": MIB, "copy_bandwidth": 5000.0}, {"beyond": 1, "bound": 0}),
    ],
)
def test_memory_is_blamed_only_for_scores_larger_than_l2(
    tmp_path: Path, profiled: Result, card: dict[str, float], memory: dict[str, int] | None
) -> None:
    found = facts_of(tmp_path, [profiled, machine(**card)])["memory"]
    assert found == memory or (memory is not None and memory.items() <= found.items())


Record = Mapping[str, Any]


def changed(change: Callable[[Record], float | None], **more: Any) -> Callable[[Result], Result]:
    """The result with other values; records whose value becomes None are left out."""

    def applied(result: Result) -> Result:
        records = [{**record, "value": change(record)} for record in result.measurements]
        kept = tuple(record for record in records if record["value"] is not None)
        return replace(result, measurements=kept, **more)

    return applied


def scaled(factor: float, **labels: str) -> Callable[[Record], float]:
    """Multiplies the values of records with these labels."""
    return lambda record: (
        record["value"] * (factor if labels.items() <= record["labels"].items() else 1)
    )


BRANCHES: dict[str, Callable[[Result], Result]] = {
    "gpu": lambda result: result,
    "cpu": lambda result: replace(result, machine={**result.machine, "device": "cpu"}),
    "mask takes longer": changed(scaled(3.0, part="scale_and_mask")),
    "backward lowers": changed(scaled(0.1, mode="forward_backward", family="matmul_simt")),
    "no costs": changed(lambda r: None if r["quantity"] in ("flops", "traffic") else r["value"]),
    "no parts": changed(lambda r: None if "part" in r["labels"] else r["value"], data={}),
}


@pytest.mark.parametrize("branch", [*BRANCHES, "out of memory", "missing", "two precisions"])
@pytest.mark.parametrize("l2", [None, MIB])
def test_every_branch_of_the_templates_renders(
    tmp_path: Path, profiled: Result, branch: str, l2: int | None
) -> None:
    found = [BRANCHES[branch](profiled)] if branch in BRANCHES else []
    if branch == "two precisions":
        found = [profiled, replace(profiled, parameters={**POINT, "precision": "bf16"})]
    if branch == "out of memory":
        found = [result(POINT, chapter="profile", status="oom", reason="asked for 9 GiB")]
    card = [machine(l2_bytes=l2, copy_bandwidth=100.0)] if l2 else []
    missing = Point("profile", {**POINT, "context": 8}, {})
    results = written(tmp_path, [*found, *card], [missing])
    chapter = build_chapter("profile", page, results)
    report = Report(results, {"profile": chapter}, tmp_path, ROOT / "report" / "templates", "full")
    assert [fault for fault in report.write() if "profile" in fault] == []
    text = (tmp_path / "chapters" / "profile.md").read_text()
    assert ("sm80" in text or "sgemm" in text) == (branch not in ("out of memory", "missing"))
    assert all(figure.rows(chapter.own) is not None for figure in page.FIGURES.values())
