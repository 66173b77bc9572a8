"""The topics over attention alone, on a CPU and at small shapes."""

from __future__ import annotations

import json

import pytest
import torch

from lmlab.chapters.attention.measure import benchmark, leaderboard, measure, memory
from lmlab.chapters.attention.measure.problem import Problem, Shape
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.study.points import Point
from tests.chapters.attention.points import (
    TOO_LARGE,
    WRONG,
    benchmark_point,
    leaderboard_point,
    naive_point,
    size_point,
    tiles_point,
)
from tests.chapters.pages import found, value_of


def timed(outcome: Outcome) -> list[tuple[str, str]]:
    """Variant and phase of every time that has a value."""
    labels = [r["labels"] for r in found(outcome, "time") if r["status"] == "ok"]
    return [(each["variant"], each["phase"]) for each in labels]


def status(outcome: Outcome, variant: str) -> str:
    """What became of a variant."""
    return str(next(r["status"] for r in found(outcome, "time", variant=variant)))


def test_an_unknown_topic_is_refused(cpu: torch.device) -> None:
    with pytest.raises(ValueError, match="allowed: naive, softmax"):
        measure(Point("attention", {"topic": "magic"}), cpu)


def test_naive_times_both_passes_and_counts_what_is_saved(cpu: torch.device) -> None:
    outcome = measure(naive_point("naive", "tiled"), cpu)
    variants, phases = ("naive", "tiled"), ("forward", "backward")
    assert timed(outcome) == [(name, phase) for name in variants for phase in phases]
    assert {record["n"] for record in found(outcome, "time")} == {3}
    saved = {name: value_of(outcome, "saved_memory", variant=name) for name in variants}
    output, log_sum_exp = 2 * 32 * 8 * 4, 2 * 32 * 4
    assert saved == {"naive": 2 * 32 * 32 * 4, "tiled": output + log_sum_exp}
    assert found(outcome, "memory") == [], "a CPU has no allocator statistics"
    json.dumps(outcome.measurements, allow_nan=False)


def test_memory_of_a_problem_excludes_what_others_hold(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(batch=1, heads=None, sequence=8, head_dim=4, precision="fp32", is_causal=False)
    problem = Problem(shape, cpu, seed=0)
    inputs, others = 4 * problem.q.nbytes, 1000
    allocated, peaks = iter([0, 10]), iter([25, 70])
    base = inputs + others
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: base + next(allocated))
    monkeypatch.setattr(memory, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda device: base + next(peaks))
    stages = memory.memory_stages(lambda q, k, v: q + k + v, problem, torch.device("cuda"))
    assert stages == {
        "forward_peak": inputs + 25,
        "before_backward": inputs + 10,
        "peak": inputs + 70,
    }


def test_only_correct_variants_are_timed(cpu: torch.device) -> None:
    names = ("naive", "sdpa_math", WRONG, "flash", TOO_LARGE)
    outcome = measure(benchmark_point(*names), cpu)
    passes = ("forward", "backward", "both")
    assert timed(outcome) == [(name, phase) for phase in passes for name in names[:2]]
    assert [status(outcome, name) for name in names[2:]] == ["failed", "unsupported", "oom"]
    assert value_of(outcome, "error", variant="naive", tensor="output") < 1e-5
    assert value_of(outcome, "error", variant=WRONG, tensor="output") > 0.1
    assert value_of(outcome, "first_call_time", variant="naive") > 0
    assert value_of(outcome, "flops", phase="both") == 7 * 64 * 64 * 16


def test_a_models_shape_has_its_heads(cpu: torch.device) -> None:
    outcome = measure(size_point("shapes", variants=["naive", "unfused"]), cpu)
    assert {name for name, _ in timed(outcome)} == {"naive", "unfused"}
    assert value_of(outcome, "flops", phase="forward") == 4 * 3 * 2 * 24 * 24 * 16 / 2


def test_softmax_is_timed_fused_and_operation_by_operation(cpu: torch.device) -> None:
    outcome = measure(size_point("softmax"), cpu)
    parts = [record["labels"]["part"] for record in found(outcome, "time")]
    assert parts[2:-1] == ["softmax", "max", "subtract", "exp", "sum", "divide"]
    assert {record["status"] for record in outcome.measurements} == {"ok"}


def test_a_sustained_run_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.testing.do_bench", lambda *_, **__: [float(n) for n in range(2000)])
    asked = leaderboard_point().settings
    times = leaderboard.sustained(lambda: None, asked)
    assert times.samples_ms == tuple(float(n) for n in range(0, 2000, 4))


def test_host_time_ends_before_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(memory, "synchronize", waited.append)
    shape = Shape(batch=1, heads=None, sequence=8, head_dim=4, precision="fp32", is_causal=False)
    variants, device = Variants(["a"], torch.device("cpu")), torch.device("cuda")
    problem = Problem(shape, torch.device("cpu"), seed=0)
    memory.note_host_time(variants, "a", lambda q, k, v: q * k * v, problem, device)
    assert [r["labels"]["phase"] for r in variants.records] == ["forward", "backward", "both"]
    assert len(waited) >= 6, "before every call, and at the end"


@pytest.mark.parametrize(("sequence", "ends"), [(96, "unsupported"), (32, "ok")])
def test_a_loop_in_python_is_capped_by_its_estimate(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch, sequence: int, ends: str
) -> None:
    monkeypatch.setattr(benchmark, "PROBE", 32)
    point = benchmark_point("tiled", "naive", sequence=sequence, variant_cap_s=1e-6)
    outcome = measure(point, cpu)
    assert (status(outcome, "tiled"), status(outcome, "naive")) == (ends, "ok")
    assert len(found(outcome, "estimated_time", variant="tiled")) == (ends == "unsupported")


UNSUPPORTED = {
    "precision": benchmark_point("naive", precision="tf32"),
    "tiles": tiles_point(),
    "leaderboard": leaderboard_point(),
}


@pytest.mark.parametrize("point", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_a_cpu_cannot_do_is_unsupported(cpu: torch.device, point: Point) -> None:
    with pytest.raises(Unsupported):
        measure(point, cpu)


@pytest.mark.parametrize("is_causal", [True, False])
def test_flops_follow_the_usual_convention(is_causal: bool) -> None:
    shape = Shape(batch=1, heads=2, sequence=64, head_dim=16, precision="fp32", is_causal=is_causal)
    forward = (4 if is_causal else 8) * 64 * 64 * 16
    assert shape.flops() == {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}
