"""What each topic of the chapter measures, on a CPU and in small."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lmlab.chapters.attention.measure import benchmark, measure, naive
from lmlab.chapters.attention.measure.problem import Problem, Shape
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.study.points import Point
from tests.chapters.attention.points import (
    benchmark_point,
    leaderboard_point,
    naive_point,
    tiles_point,
)

WRONG = "tests.chapters.attention.variants:upside_down"
TOO_LARGE = "tests.chapters.attention.variants:too_large"


def arms(outcome: Outcome) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = outcome.data["arms"]
    return rows


def test_a_topic_that_does_not_exist_is_refused(cpu: torch.device) -> None:
    with pytest.raises(ValueError, match="allowed: naive, model_compile"):
        measure(Point("attention", {"topic": "magic"}), cpu)


def test_naive_gives_forward_and_backward_of_every_arm(cpu: torch.device) -> None:
    outcome = measure(naive_point(variants=["naive", "tiled"]), cpu)
    assert outcome.status == "ok"
    assert list(outcome.measurements) == [
        *("naive.forward", "naive.backward", "tiled.forward", "tiled.backward"),
        "total",
    ]
    assert {len(m.samples_ms) for m in outcome.measurements.values()} == {3}
    json.dumps(outcome.data, allow_nan=False)


def test_naive_says_what_it_keeps_for_backward(cpu: torch.device) -> None:
    rows = arms(measure(naive_point(variants=["naive", "tiled"]), cpu))
    assert rows["naive"]["saved_bytes"] == 2 * 32 * 32 * 4, "one tensor of weights"
    assert rows["tiled"]["saved_bytes"] == 2 * 32 * 8 * 4 + 2 * 32 * 4, "output and log-sum-exp"
    assert rows["naive"]["peak_memory_bytes"] is None, "nobody counts on a CPU"


def test_naive_holds_its_inputs_and_what_comes_on_top_at_three_moments(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(batch=1, heads=None, sequence=8, head_dim=4, precision="fp32", is_causal=False)
    problem = Problem(shape, cpu, seed=0)
    given, others = 4 * problem.q.nbytes, 1000
    allocated, peaks = iter([0, 10]), iter([25, 70])
    base = given + others
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: base + next(allocated))
    monkeypatch.setattr(naive, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(naive, "peak_memory_bytes", lambda device: base + next(peaks))
    found = naive.memory(lambda q, k, v: q + k + v, problem, torch.device("cuda"))
    assert found == {
        "forward_peak_memory_bytes": given + 25,
        "memory_before_backward_bytes": given + 10,
        "peak_memory_bytes": given + 70,
    }


def test_naive_without_memory_is_a_value_with_its_account(cpu: torch.device) -> None:
    outcome = measure(naive_point(variants=[TOO_LARGE]), cpu)
    assert outcome.status == "oom"
    assert outcome.measurements == {}
    assert [row["tensor"] for row in outcome.data["account"]["peak"]][4] == "weights"


def test_a_race_times_three_passes_of_the_arms_that_are_right(cpu: torch.device) -> None:
    outcome = measure(benchmark_point("naive", "sdpa_math", WRONG, "flash"), cpu)
    assert list(outcome.measurements) == [
        f"{arm}.{name}"
        for name in ("forward", "backward", "both")
        for arm in ("naive", "sdpa_math")
    ]
    assert arms(outcome)[WRONG]["status"] == "failed"
    assert "output off by" in arms(outcome)[WRONG]["reason"]
    assert arms(outcome)["flash"]["status"] == "unsupported"
    assert arms(outcome)["naive"]["errors"]["output"] < 1e-5
    json.dumps(outcome.data, allow_nan=False)


def test_an_arm_whose_numbers_are_none_is_written_down_all_the_same(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.chapters.attention import variants

    monkeypatch.setattr(
        variants, "upside_down", lambda q, k, v, *, is_causal: (q + k + v) * float("nan")
    )
    outcome = measure(benchmark_point(WRONG, "naive"), cpu)
    assert arms(outcome)[WRONG]["errors"]["output"] is None
    assert arms(outcome)[WRONG]["status"] == "failed"
    json.dumps(outcome.data, allow_nan=False)


def test_an_arm_without_memory_does_not_stop_the_race(cpu: torch.device) -> None:
    outcome = measure(benchmark_point(TOO_LARGE, "naive"), cpu)
    assert outcome.status == "ok"
    assert arms(outcome)[TOO_LARGE] == {"status": "oom", "reason": "no room (cpu)"}
    assert "naive.both" in outcome.measurements


def test_an_arm_that_walks_in_python_is_capped_by_its_time_over_a_short_sequence(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "PROBE", 32)
    outcome = measure(benchmark_point("tiled", "naive", sequence=96, variant_cap_s=1e-6), cpu)
    assert arms(outcome)["tiled"]["status"] == "capped"
    assert "over 32 queries; the cap is 1e-06 s" in arms(outcome)["tiled"]["reason"]
    assert "naive.forward" in outcome.measurements, "an arm of one launch is never capped"


def test_a_short_sequence_is_never_capped(cpu: torch.device) -> None:
    outcome = measure(benchmark_point("tiled", variant_cap_s=1e-6), cpu)
    assert arms(outcome)["tiled"]["status"] == "ok"


def test_a_precision_that_the_device_lacks_is_unsupported(cpu: torch.device) -> None:
    with pytest.raises(Unsupported, match="tf32"):
        measure(benchmark_point("naive", precision="tf32"), cpu)


@pytest.mark.parametrize("point", [tiles_point(), leaderboard_point()], ids=["tiles", "board"])
def test_what_only_a_gpu_can_tell_is_unsupported_on_a_cpu(cpu: torch.device, point: Point) -> None:
    with pytest.raises(Unsupported, match="CPU"):
        measure(point, cpu)


@pytest.mark.parametrize(
    ("is_causal", "forward"), [(True, 4 * 64 * 64 * 16), (False, 8 * 64 * 64 * 16)]
)
def test_operations_by_the_usual_count(is_causal: bool, forward: float) -> None:
    shape = Shape(batch=1, heads=2, sequence=64, head_dim=16, precision="fp32", is_causal=is_causal)
    assert shape.flops() == {
        "forward": forward,
        "backward": 2.5 * forward,
        "both": 3.5 * forward,
    }


def test_inputs_are_random_of_the_type_asked_for_and_want_gradients(cpu: torch.device) -> None:
    shape = Shape(batch=2, heads=None, sequence=64, head_dim=16, precision="bf16", is_causal=True)
    problem = Problem(shape, cpu, seed=0)
    assert {x.dtype for x in problem.inputs} == {torch.bfloat16}
    assert all(x.requires_grad and x.shape == (2, 64, 16) for x in problem.inputs)
    assert not torch.equal(problem.q, problem.k)
    assert torch.equal(problem.q, Problem(shape, cpu, seed=0).q)
    assert 0.8 < float(problem.grad_o.float().std()) < 1.2
