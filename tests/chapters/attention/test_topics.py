"""The topics over attention alone and over whole models, on a CPU and at small shapes."""

import json
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from lmlab.chapters.attention.measure import benchmark, leaderboard, measure, rounds, tiles
from lmlab.chapters.attention.measure.problem import Problem, Shape, check, shape_of
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels.problem import Direction
from lmlab.study.points import Point
from tests.chapters.attention import points
from tests.chapters.attention.points import TOO_LARGE, WRONG
from tests.chapters.pages import found, value_of
from tests.chapters.test_end_to_end import WATCHING

TINY = Shape(batch=1, heads=None, sequence=8, head_dim=4, precision="fp32", is_causal=False)


def timed(outcome: Outcome) -> list[tuple[str, str]]:
    labels = [r["labels"] for r in found(outcome, "time") if r["status"] == "ok"]
    return [(each["variant"], each["phase"]) for each in labels]


def status(outcome: Outcome, variant: str) -> str:
    return str(next(r["status"] for r in found(outcome, "time", variant=variant)))


def test_naive_times_both_passes_and_counts_what_is_saved(cpu: torch.device) -> None:
    outcome = measure(points.naive_point("naive", "tiled"), cpu)
    variants, phases = ("naive", "tiled"), ("forward", "backward")
    assert timed(outcome) == [(name, phase) for name in variants for phase in phases]
    assert {record["n"] for record in found(outcome, "time")} == {3}
    saved = {name: value_of(outcome, "saved_memory", variant=name) for name in variants}
    output, log_sum_exp = 2 * 32 * 8 * 4, 2 * 32 * 4
    assert saved == {"naive": 2 * 32 * 32 * 4, "tiled": output + log_sum_exp}
    assert found(outcome, "memory") == [], "a CPU has no allocator statistics"
    json.dumps(outcome.measurements, allow_nan=False)


def test_memory_excludes_other_tensors(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(TINY, cpu, seed=0)
    inputs, others = 4 * problem.q.nbytes, 1000
    allocated, peaks = iter([0, 10]), iter([25, 70])
    base = inputs + others
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: base + next(allocated))
    monkeypatch.setattr(rounds, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(rounds, "peak_memory_bytes", lambda device: base + next(peaks))
    variants = Variants(["a"], torch.device("cuda"))
    rounds.note_memory(variants, "a", lambda q, k, v: q + k + v, problem)
    stages = {record["labels"]["stage"]: record["value"] - inputs for record in variants.records}
    assert stages == {"forward_peak": 25, "before_backward": 10, "peak": 70}


def test_only_correct_variants_are_timed(cpu: torch.device) -> None:
    names = ("naive", "sdpa_math", WRONG, "flash", TOO_LARGE)
    outcome = measure(points.benchmark_point(*names), cpu)
    passes = ("forward", "backward", "both")
    assert timed(outcome) == [(name, phase) for phase in passes for name in names[:2]]
    assert [status(outcome, name) for name in names[2:]] == ["failed", "unsupported", "oom"]
    assert value_of(outcome, "error", variant="naive", tensor="output") < 1e-5
    assert value_of(outcome, "error", variant=WRONG, tensor="output") > 0.1
    assert value_of(outcome, "first_call_time", variant="naive") > 0
    assert value_of(outcome, "flops", phase="both") == 7 * 64 * 64 * 16


def test_topics_over_a_models_shape_have_its_heads(cpu: torch.device) -> None:
    outcome = measure(points.size_point("shapes", variants=["naive", "unfused"]), cpu)
    assert {name for name, _ in timed(outcome)} == {"naive", "unfused"}
    assert value_of(outcome, "flops", phase="forward") == 4 * 3 * 2 * 24 * 24 * 16 / 2
    # Softmax is timed fused and operation by operation.
    outcome = measure(points.size_point("softmax"), cpu)
    parts = [record["labels"]["part"] for record in found(outcome, "time")]
    assert parts[2:-1] == ["softmax", "max", "subtract", "exp", "sum", "divide"]
    assert {record["status"] for record in outcome.measurements} == {"ok"}


def test_a_sustained_run_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.testing.do_bench", lambda *_, **__: [float(n) for n in range(2000)])
    times = leaderboard.sustained(lambda: None, points.leaderboard_point().settings)
    assert times.samples_ms == tuple(float(n) for n in range(0, 2000, 4))


def test_host_time_ends_before_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(rounds, "synchronize", waited.append)
    variants = Variants(["a"], torch.device("cuda"))
    problem = Problem(TINY, torch.device("cpu"), seed=0)
    rounds.note_host_time(variants, "a", lambda q, k, v: q * k * v, problem)
    assert [r["labels"]["phase"] for r in variants.records] == ["forward", "backward", "both"]
    assert len(waited) >= 6, "before every call, and at the end"


@pytest.mark.parametrize(("sequence", "ends"), [(96, "unsupported"), (32, "ok")])
def test_a_loop_in_python_is_capped_by_its_estimate(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch, sequence: int, ends: str
) -> None:
    monkeypatch.setattr(benchmark, "PROBE", 32)
    point = points.benchmark_point("tiled", "naive", sequence=sequence, variant_cap_s=1e-6)
    outcome = measure(point, cpu)
    assert (status(outcome, "tiled"), status(outcome, "naive")) == (ends, "ok")
    assert len(found(outcome, "estimated_time", variant="tiled")) == (ends == "unsupported")


@pytest.mark.parametrize(
    "point", [points.tiles_point(), points.leaderboard_point()], ids=["tiles", "board"]
)
def test_what_a_cpu_cannot_do_is_unsupported(cpu: torch.device, point: Point) -> None:
    with pytest.raises(Unsupported):
        measure(point, cpu)


PHASES = ("forward", "backward", "forward_backward", "train_step")


def test_attentions_share_a_model_and_have_one_loss(cpu: torch.device) -> None:
    outcome = measure(points.model_point("model", "naive", "tiled", "flash", TOO_LARGE), cpu)
    assert timed(outcome) == [(name, p) for name in ("naive", "tiled") for p in PHASES]
    losses = [value_of(outcome, "loss", variant=name) for name in ("naive", "tiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert [status(outcome, name) for name in ("flash", TOO_LARGE)] == ["unsupported", "oom"]
    assert value_of(outcome, "tokens") == 2 * 8


def test_only_fitting_equals_are_timed(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "last_rows_zero", lambda q, k, v, *, is_causal: 0 * v)
    outcome = measure(points.model_point("model", TOO_LARGE, "tiled", WRONG), cpu)
    assert [status(outcome, name) for name in (TOO_LARGE, WRONG)] == ["oom", "failed"]
    assert timed(outcome) == [("tiled", phase) for phase in PHASES]


def test_attention_of_a_users_model_cannot_be_exchanged(cpu: torch.device) -> None:
    outcome = measure(points.model_point("model", "naive", "tiled", model=WATCHING), cpu)
    assert outcome.status == "unsupported"


def test_eager_and_compiled_agree(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # The graph alone: inductor's code is for a GPU, and for its own tests.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    outcome = measure(points.model_point("model_compile", num_layers=1), cpu)
    assert timed(outcome) == [(name, p) for name in ("eager", "compiled") for p in PHASES]
    assert value_of(outcome, "first_step_time", variant="compiled") > 0
    assert value_of(outcome, "attention_replaced", variant="compiled") == 0
    samples = [found(outcome, "time", variant="eager", phase=p)[0]["samples"] for p in PHASES]
    for forward, backward, both, step in zip(*samples, strict=True):
        assert forward + backward == pytest.approx(both)
        assert both < step


def test_failed_compiling_costs_itself(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = Mock(side_effect=MemoryError("no room"))
    monkeypatch.setattr(torch, "compile", Mock(return_value=breaks))
    outcome = measure(points.model_point("model_compile", num_layers=1), cpu)
    assert (status(outcome, "compiled"), timed(outcome)) == ("oom", [("eager", p) for p in PHASES])


# Tiles: any size gives the same numbers, here through Triton's interpreter.
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


def kernel(direction: Direction, device: torch.device) -> tiles.Kernel:
    point = points.tiles_point(direction)
    shape = shape_of({**point.settings, **point.parameters, "sequence": 64})
    return tiles.Kernel(Problem(shape, device, seed=0), direction)


@DIRECTIONS
def test_tiles_are_launched_checked_and_estimated(cpu: torch.device, direction: Direction) -> None:
    run = kernel(direction, cpu)
    chosen = tiles.tiles_of(32, 16, direction, stages=2)
    errors = run.errors(chosen)
    assert set(errors) == ({"output"} if direction == "forward" else {"grad_q", "grad_k", "grad_v"})
    check(errors, torch.float32)
    resources = dict(run.resources(chosen))
    assert (resources.pop("estimated_shared_memory") or 0) > 0
    assert set(resources.values()) == {None}, "the interpreter compiles nothing"


@DIRECTIONS
def test_m_counts_queries_and_n_counts_keys_in_both_directions(direction: Direction) -> None:
    labels = tiles.labels(tiles.tiles_of(128, 32, direction, stages=3))
    assert (labels["block_m"], labels["block_n"]) == (128, 32)
    assert labels["num_warps"] == (8 if direction == "forward" else 4), "by the tile held"


def test_large_tiles_are_unsupported(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernel("forward", cpu)
    too_large = tiles.launch.TilesTooLarge("tiles 32 x 16: out of resource: shared memory")
    monkeypatch.setattr(run, "_call", Mock(side_effect=too_large))
    with pytest.raises(Unsupported, match="out of resource: shared memory"):
        list(run.resources(tiles.tiles_of(32, 16, "forward", stages=2)))


@pytest.mark.slow
def test_every_tile_size_and_the_chosen_one_are_timed(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "refuse_unsupported", lambda *_: None)
    outcome = tiles.measure(points.tiles_point(), cpu)
    times = found(outcome, "time")
    variants = ["32x32", "16x32", "chosen"]
    measured = [(time["labels"]["sequence"], time["labels"]["variant"]) for time in times]
    assert measured == [(sequence, name) for sequence in (32, 64) for name in variants]
    assert {time["status"] for time in times} == {"ok"}
    at = {"sequence": 64, "variant": "16x32"}
    assert value_of(outcome, "error", **at, block_m=16, tensor="output") < 1e-5
    assert value_of(outcome, "shared_memory_limit") > 0
