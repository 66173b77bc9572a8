"""The profile page: shares and ratios from recorded kernels, and every branch of its templates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.profile import page
from lmlab.chapters.profile.trace_data import of_trace
from lmlab.measure.records import value
from lmlab.measure.trace import nsys
from lmlab.report.frame import select
from lmlab.report.page import build_chapter
from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.chapters.pages import rendered
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, write_export
from tests.report.study import result, time_record, written

POINT = {"size": "small", "context": 512, "batch": 4, "precision": "fp32", "attention": "naive"}
COSTS = {"scores": 40, "scale_and_mask": 1, "softmax": 5, "output": 40}
MIB = 2**20
FLOPS = 10**9


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A forward pass of 2.2 ms with 10 MB of scores per layer, as if nsys had recorded it."""
    export = tmp_path_factory.mktemp("export") / "export.sqlite"
    write_export(export)
    records, data = of_trace(nsys.read(export))
    costs = [value("flops", flops * 10**6, "FLOP", part=part) for part, flops in COSTS.items()]
    costs += [value("traffic", 40 * 10**6, "B", part=part) for part in COSTS]
    costs += [value("matmul_flops", FLOPS, "FLOP", mode="train_step")]
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
    assert (facts["backward_raises"], facts["optimizer_lowers"]) == (1, 1)
    assert facts["clock_agrees"] == {"fp32": [True]}
    assert facts["softmax_time"]["high"]["value"] == pytest.approx(100 / 400)
    assert facts["softmax_flops"]["high"]["value"] == pytest.approx(5 / 80)
    assert facts["mask"]["high"]["value"] == pytest.approx(1)
    assert facts["pointwise"]["fp32"]["high"]["value"] == pytest.approx(200 / 600)
    assert facts["cores"] == {"fp32": {"tensor": 0, "SIMT": 1, "unknown": 0}}


@pytest.mark.parametrize(
    ("card", "memory"),
    [
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


def test_a_steps_utilization_is_a_product_of_three_shares(tmp_path: Path, profiled: Result) -> None:
    busy_us, matmul_us = FORWARD_US + BACKWARD_US + OPTIMIZER_US, 2000 + BACKWARD_US
    step = {**POINT, "mode": "train_step", "start": "warm"}
    other = result(step, [time_record([busy_us / 500], phase="total")], chapter="end_to_end")
    peak = value("stated_matmul_rate", 1000.0, "TFLOP/s", dtype="fp32")
    results = [profiled, other, result({}, [peak], chapter="machine")]
    rows = build_chapter("profile", page, written(tmp_path, results)).own.rows
    factors = ("share_of_peak", "matmul_share", "device_share", "utilization")
    found = {
        name: select(rows, quantity=name, mode="train_step")["value"].iloc[0] for name in factors
    }
    rate = FLOPS / (matmul_us / 1e6) / 1e12
    assert found == pytest.approx(
        {
            "share_of_peak": rate / 1000,
            "matmul_share": matmul_us / busy_us,
            "device_share": 0.5,
            "utilization": FLOPS / (2 * busy_us / 1e6) / 1e15,
        }
    )
    backward = select(rows, quantity="backward_to_forward")["value"].iloc[0]
    assert backward == pytest.approx(BACKWARD_US / FORWARD_US)


Change = Callable[[Mapping[str, Any]], float | None]


def changed(change: Change, **more: Any) -> Callable[[Result], Result]:
    """The result with other values; records whose value becomes None are left out."""

    def applied(result: Result) -> Result:
        records = [{**record, "value": change(record)} for record in result.measurements]
        kept = tuple(record for record in records if record["value"] is not None)
        return replace(result, measurements=kept, **more)

    return applied


def scaled(factor: float, **labels: str) -> Change:
    """Multiplies the values of records with these labels."""
    return lambda record: (
        record["value"] * (factor if labels.items() <= record["labels"].items() else 1)
    )


BRANCHES: dict[str, Callable[[Result], Result]] = {
    "gpu": lambda result: result,
    "cpu": lambda result: replace(result, machine={**result.machine, "device": "cpu"}),
    "mask takes longer": changed(scaled(3.0, part="scale_and_mask")),
    "backward lowers": changed(scaled(0.1, mode="forward_backward", family="matmul_simt")),
    "only forward fits": changed(
        lambda r: r["value"] if r["labels"].get("mode") in (None, "forward") else None
    ),
    "no costs": changed(lambda r: None if r["quantity"] in ("flops", "traffic") else r["value"]),
    "no parts": changed(lambda r: None if "part" in r["labels"] else r["value"], data={}),
    "two precisions": lambda result: replace(result, parameters={**POINT, "precision": "bf16"}),
}


@pytest.mark.parametrize("branch", [*BRANCHES, "out of memory"])
def test_every_branch_renders(tmp_path: Path, profiled: Result, branch: str) -> None:
    found = [BRANCHES[branch](profiled)] if branch in BRANCHES else []
    if branch == "two precisions":
        found = [profiled, *found, machine(l2_bytes=MIB, copy_bandwidth=100.0)]
    if branch == "out of memory":
        found = [result(POINT, chapter="profile", status="oom", reason="needs 9 GiB more")]
    missing = Point("profile", {**POINT, "context": 8}, {})
    results, once = written(tmp_path, found, [missing]), branch == "gpu"
    front, pages = rendered(tmp_path, results, "profile", draw=once)
    assert "nan" not in front.lower().split()
    assert ("ampere 128x64 tn" in pages["profile"]) == (branch != "out of memory")
    assert (", bf16" in pages["profile"]) == (branch == "two precisions")
