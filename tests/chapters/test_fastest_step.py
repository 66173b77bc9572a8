"""The ladder of training steps: checked rungs, searched batches, and the page they give."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lmlab.chapters.fastest_step import grid
from lmlab.chapters.fastest_step.measure import ladder, leaderboard, measure
from lmlab.chapters.fastest_step.measure.ladder import Ladder
from lmlab.chapters.fastest_step.measure.rungs import Rung
from lmlab.chapters.fastest_step.measure.trainer import RungStep, Trainer
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.records import value
from lmlab.study.points import Point
from tests import project
from tests.chapters.pages import answer, found, rendered, value_of
from tests.chapters.test_end_to_end import SHAPE
from tests.jobs.points import SETTINGS
from tests.report.study import machine_card, result, time_record, written

LADDER: dict[str, Any] = {
    "rungs": ["fp32"],
    "attentions": ["sdpa_math", "tiled"],
    "variants": ["naive"],
    "batches": [2, 4, 8, 16],
    "checkpoint": "every-1",
    "precision": "fp32",
    "warmup": 0,
    "energy_s": 0,
    "samples": 3,
    "variant_cap_s": 0.01,
}


def ladder_point(**changes: Any) -> Point:
    settings = {**SETTINGS, **LADDER, "steps": 2, **changes}
    return Point(
        "fastest_step", {"topic": "ladder", "size": "s", "context": 8, "batch": 2}, settings
    )


def fail_beyond(
    monkeypatch: pytest.MonkeyPatch,
    most: Callable[[Rung], int],
    error: type[Exception] = torch.OutOfMemoryError,
) -> None:
    """Steps of more copies of the batch fail."""
    run = RungStep.run

    def limited(step: RungStep) -> None:
        if step.rung.copies > most(step.rung):
            raise error("full")
        run(step)

    monkeypatch.setattr(RungStep, "run", limited)


def wrong(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    return v


@pytest.mark.parametrize(("worthwhile", "tried"), [(0.0, {4, 8, 16, 32}), (1e9, {4, 8, 16})])
def test_rungs_agree_with_the_first_and_alternate_with_the_last(
    worthwhile: float, tried: set[int], cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "WORTHWHILE", worthwhile)
    asked = {"rungs": ["fp32", "attention", "batch"], "batches": [4, 8, 16, 32]}
    outcome = measure(ladder_point(**asked), cpu)
    for rung in ("fp32", "attention", "batch"):
        assert value_of(outcome, "gradient_error", variant=rung) < 1e-5
    sides = [r["labels"]["side"] for r in found(outcome, "time", rung="attention")]
    assert sorted(sides) == ["before", "other", "rung"]
    best = value_of(outcome, "tokens", variant="batch") // 8
    rates = {r["labels"]["batch_size"]: r["value"] for r in found(outcome, "tried_throughput")}
    assert set(rates) == tried
    assert max(rates, key=lambda batch: rates[batch]) == best
    step = found(outcome, "time", rung="batch", side="rung")[0]
    (per_token,) = found(outcome, "token_time", rung="batch", side="rung")
    assert per_token["value"] == pytest.approx(step["value"] / (8 * best))


def test_what_a_cpu_cannot_do_is_skipped_with_a_reason(cpu: torch.device) -> None:
    rungs = ["fp32", "tf32", "attention", "adamw", "loss", "masters", "graph"]
    outcome = measure(ladder_point(rungs=rungs, attentions=["sdpa_math"]), cpu)
    status = {r["labels"]["rung"]: r["status"] for r in found(outcome, "time")}
    assert status == {**dict.fromkeys(rungs, "unsupported"), "fp32": "ok", "attention": "ok"}
    assert all(r["reason"] for r in found(outcome, "time") if r["status"] != "ok")


def test_a_rung_with_wrong_gradients_gets_no_time(cpu: torch.device) -> None:
    own = "tests.chapters.test_fastest_step:wrong"
    outcome = measure(ladder_point(rungs=["fp32", "attention", "batch"], attentions=[own]), cpu)
    (record,) = found(outcome, "time", rung="attention")
    assert (record["status"], record["value"]) == ("failed", None)
    (after,) = found(outcome, "time", rung="batch", side="rung")
    assert after["labels"]["attention"] == "naive"


def test_checkpointing_takes_the_rest(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "WORTHWHILE", 0.0)
    fail_beyond(monkeypatch, lambda rung: 2 if rung.checkpoint == "none" else 4)
    outcome = measure(ladder_point(rungs=["fp32", "batch", "checkpoint"]), cpu)
    tries = {
        (r["labels"]["checkpoint"], r["labels"]["batch_size"]): r["status"]
        for r in found(outcome, "tried_throughput")
    }
    assert tries == {
        ("none", 4): "ok", ("none", 8): "oom", ("every-1", 8): "ok", ("every-1", 16): "oom",
    }  # fmt: skip
    (taken,) = found(outcome, "time", rung="checkpoint", side="rung")
    assert taken["labels"]["batch_size"] == 8
    assert value_of(outcome, "gradient_error", variant="checkpoint") < 1e-5


@pytest.mark.parametrize(
    ("worthwhile", "most", "error"),
    [(1e9, 4, torch.OutOfMemoryError), (0.0, 2, RuntimeError)],
    ids=["8 does not help", "8 fails for another reason"],
)
def test_nothing_is_checkpointed_unless_a_batch_that_would_help_does_not_fit(
    worthwhile: float, most: int, error: type[Exception], cpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ladder, "WORTHWHILE", worthwhile)
    fail_beyond(monkeypatch, lambda rung: most, error)
    outcome = measure(ladder_point(rungs=["fp32", "batch", "checkpoint"]), cpu)
    (checkpoint,) = found(outcome, "time", rung="checkpoint")
    assert (checkpoint["status"], checkpoint["value"]) == ("unsupported", None)


def test_a_step_that_cannot_be_profiled_keeps_its_wall_time(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=[torch.OutOfMemoryError("full"), None])
    monkeypatch.setattr(ladder, "device_time", full)
    outcome = measure(ladder_point(rungs=["fp32", "attention"], attentions=["sdpa_math"]), cpu)
    assert {r["status"] for r in found(outcome, "time")} == {"ok"}
    (failed,) = found(outcome, "device_time")
    assert (failed["labels"]["rung"], failed["status"]) == ("fp32", "oom")


@pytest.mark.parametrize("part", ["_rounds", "_note_energy"])
def test_a_failure_while_a_rung_is_measured_costs_no_other(
    part: str, cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(Ladder, part), itertools.count()

    def fails_second(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("broken")
        return original(*arguments)

    monkeypatch.setattr(Ladder, part, fails_second)
    rungs = ["fp32", "attention", "batch"]
    outcome = measure(ladder_point(rungs=rungs, attentions=["sdpa_math"]), cpu)
    quantity = "time" if part == "_rounds" else "energy_per_token"
    (failed,) = (each for each in outcome.measurements if each["status"] != "ok")
    assert (failed["quantity"], failed["labels"]["rung"]) == (quantity, "attention")
    (after,) = found(outcome, "time", rung="batch", side="rung")
    assert after["labels"]["attention"] == ("naive" if part == "_rounds" else "sdpa_math")


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("flash_bwd_dq_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("loss_forward_kernel", "loss"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "matmul"),
        ("triton_poi_fused_add_3", "elementwise"),
        ("adamw_kernel", "optimizer"),
    ],
)
def test_parts_of_a_step(kernel: str, part: str) -> None:
    assert ladder.part_of(kernel) == part


def test_our_kernels_compute_the_same_step(cpu: torch.device) -> None:
    shared = Trainer(SHAPE, {"rope_theta": 1e4, "seed": 0}, cpu)
    before = [weight.detach().clone() for weight in shared.masters]
    plain, fused = (
        RungStep(shared, Rung(fused_adamw=own, fused_loss=own, copies=1 + own))
        for own in (False, True)
    )
    expected, loss = plain.gradients(), plain.loss
    torch.testing.assert_close(fused.gradients(), expected)
    torch.testing.assert_close(fused.loss, loss)
    for step in (plain, fused):
        step.run()
    assert all(torch.equal(a, b) for a, b in zip(before, shared.masters, strict=True))


def test_16_bit_weights_are_rounded_masters(cpu: torch.device) -> None:
    shared = Trainer(SHAPE, {"rope_theta": 1e4, "seed": 0}, cpu)
    narrow = Rung(precision="bf16", narrow=True, fused_adamw=True)
    step = RungStep(shared, narrow)
    pairs = zip(step.gradients(), RungStep(shared, Rung()).gradients(), strict=True)
    assert 0 < max(((a - b).norm() / b.norm()).item() for a, b in pairs) < 0.1
    model = shared.model(narrow)
    for low, high in zip(model.parameters(), shared.masters, strict=True):
        assert torch.equal(low, high.bfloat16())
    assert shared.shared_bytes(narrow) > shared.shared_bytes(Rung())


@pytest.mark.parametrize(
    "point",
    [
        *(Point("fastest_step", {"topic": topic}, {}) for topic in ("kernels", "leaderboard")),
        ladder_point(model="mine:Model"),
    ],
    ids=["kernels need a GPU", "so does the leaderboard", "another model"],
)
def test_what_cannot_be_measured_is_unsupported(point: Point, cpu: torch.device) -> None:
    with pytest.raises(Unsupported):
        measure(point, cpu)


def test_batches_are_multiples_of_the_batch() -> None:
    nano = project.study("nano")
    with pytest.raises(ValueError, match=r"fastest_step.batches = \[5\]; allowed: multiples of 2"):
        grid.points(nano, {**nano.chapters["fastest_step"], "batches": [1, 4, 5]})


def test_the_deepest_model_is_tried(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 B and 6 B per layer: 14 layers would fill 97 % of 100 B, but 13 turn out to fit."""

    def step_at(depth: int, *_: Any) -> Any:
        return ((50.0 + 10 * depth, 10 + 6 * depth) if depth < 14 else None), []

    card = type("Card", (), {"total_memory": 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(leaderboard, "step_at", step_at)
    asked = {"shallow": 2, "most_layers": 34}
    records = leaderboard.deepest(SHAPE, Rung(), asked, cpu)
    outcome = Outcome(measurements=records)
    assert value_of(outcome, "layers") == 13
    assert value_of(outcome, "layer_time") == pytest.approx(10.0)
    assert value_of(outcome, "throughput") == pytest.approx(16 / 0.18)


@pytest.mark.parametrize(
    "rungs",
    [
        ["fp32", "tf32", "bf16", "attention", "adamw", "loss", "masters", "graph", "batch"],
        pytest.param(["fp32", "bf16", "attention", "compile", "graph"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.gpu
def test_every_rung_on_a_gpu(rungs: list[str]) -> None:
    sizes = {"d_model": 128, "d_ff": 256, "vocab_size": 1000}
    point = ladder_point(rungs=rungs, attentions=["flash", "sdpa_cudnn"], energy_s=0.1, **sizes)
    outcome = measure(point, torch.device("cuda"))
    assert {r["labels"]["rung"] for r in found(outcome, "time", side="rung")} == set(rungs)
    for rung in rungs:
        assert value_of(outcome, "peak_memory", variant=rung) > 0
        assert value_of(outcome, "part_time", variant=rung, part="matmul") > 0


PARAMETERS = {"topic": "ladder", "size": "small", "context": 1024, "batch": 4}


def steps(ours: float, other: float) -> list[dict[str, Any]]:
    """Two rungs of 1,000 tokens and 1 TFLOP; the second, of any name, with two attentions."""
    records = []
    for rung, attention, side, ms in (
        ("bf16", "naive", "rung", 10.0),
        ("mine", "naive", "before", 10.0),
        ("mine", "flash", "rung", ours),
        ("mine", "sdpa_cudnn", "other", other),
    ):
        labels = {"rung": rung, "attention": attention, "precision": "bf16", "batch_size": 4}
        for quantity, center in (("time", ms), ("token_time", ms / 1e3)):
            samples = [center, center * 1.001, center * 0.999]
            records.append(time_record(samples, quantity=quantity, side=side, **labels))
        if side != "before":
            name = rung if side == "rung" else f"{rung}, {attention}"
            records.append(value("tokens", 1000, "", variant=name, **labels))
            records.append(value("flops", 10**12, "FLOP", variant=name, **labels))
    return records


@pytest.mark.parametrize("other", [4.0, 5.0, 6.0])
def test_the_front_page_names_the_best_step_and_who_is_slower(tmp_path: Path, other: float) -> None:
    results = [
        machine_card("bf16", 500.0, 1000.0, 1.0),
        result(PARAMETERS, steps(5.0, other), chapter="fastest_step"),
    ]
    front, pages = rendered(tmp_path, written(tmp_path / "r", results), "machine", "fastest_step")
    best = answer(front, "What is the fastest step?")
    assert "2.0x" in best
    assert "(batch 4, 20 %" in best  # 1 TFLOP in 5 ms, of 1,000 TFLOP/s
    assert "| mine | 200,000 | 2.0x | 20 % |" in front
    assert ("0.80x" in front) == (other < 5)
    assert "| mine | 4 | 5.00 | 200,000 | 2.0x | 20 % | 40 % |" in pages["fastest_step"]


def test_device_time_of_a_rung_is_next_to_its_wall_time(tmp_path: Path) -> None:
    device = [
        time_record([ms] * 3, clock="device", rung="mine", attention=attention, side=side)
        for attention, side, ms in (("flash", "rung", 4.9), ("sdpa_cudnn", "other", 4.0))
    ]
    parts = [
        value("part_time", ms, "ms", variant="mine", part=part, rung="mine", attention="flash")
        for part, ms in (("matmul", 3.0), ("attention", 1.0))
    ]
    results = [result(PARAMETERS, [*steps(5.0, 6.0), *device, *parts], chapter="fastest_step")]
    front, pages = rendered(tmp_path, written(tmp_path / "r", results), "fastest_step")
    assert "| mine | 4 | 5.00 | 4.90 | 98 % | 200,000 | 2.0x |" in pages["fastest_step"]
    assert "| rung | matmul | attention |" in pages["fastest_step"]
    assert "| mine | 3.00 | 1.00 |" in pages["fastest_step"]
    assert "matmuls take 75 % of that" in front
    assert "by device time, 1 of 1 rungs is slower than with SDPA cuDNN, at worst 0.82x" in front


def test_a_ladder_without_any_rung_has_the_reason_of_the_first_and_a_page(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_beyond(monkeypatch, lambda rung: 0)
    outcome: Outcome = measure(ladder_point(rungs=["fp32", "attention"]), cpu)
    assert outcome.status == "oom"
    failed = result(PARAMETERS, chapter="fastest_step", status="oom", reason=outcome.reason)
    front, _ = rendered(tmp_path, written(tmp_path / "r", [failed]), "fastest_step")
    assert "Not measured yet" in answer(front, "What is the fastest step?")
