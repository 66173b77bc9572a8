"""Profile: three modes in one capture, a wall time taken before, and who may record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.profile import measure as profile
from lmlab.chapters.profile.measure import measure, trace_folder
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step
from lmlab.measure.trace import chrome_trace
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE, UNDER_NSYS
from tests.jobs.points import profile_point

CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "train_step")
MATMULS = 2 * 9 + 1  # per layer 7 projections and 2 in attention, and the head


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(UNDER_NSYS, raising=False)
    monkeypatch.delenv(NSYS_UNAVAILABLE, raising=False)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measure(profile_point(), CPU)


def values(outcome: Outcome, quantity: str, *labels: str) -> dict[Any, Any]:
    """Values of a quantity by these labels."""
    return {
        tuple(record["labels"].get(label) for label in labels): record["value"]
        for record in outcome.measurements
        if record["quantity"] == quantity
    }


def test_each_mode_runs_its_phases_and_they_add_up(outcome: Outcome) -> None:
    families = values(outcome, "family_instances", "mode", "family")
    assert families["forward", "matmul"] == MATMULS
    assert families["forward_backward", "matmul"] == 3 * MATMULS
    assert families["train_step", "matmul"] == 3 * MATMULS
    assert [mode for mode, family in families if family == "optimizer"] == ["train_step"]
    for quantity in ("kernels", "total_time", "host_time"):
        found = values(outcome, quantity, "mode", "phase")
        for mode in MODES:
            phases = [v for (m, phase), v in found.items() if m == mode and phase != "total"]
            assert sum(phases) == pytest.approx(found[mode, "total"])


def test_the_forward_pass_is_timed_before_it_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(name: str, function: Any) -> None:
        monkeypatch.setattr(
            profile, name, lambda *a, **k: (order.append(name), function(*a, **k))[1]
        )

    note("time_steps", profile.time_steps)
    note("profile", profile.profile)
    monkeypatch.setenv(NSYS_UNAVAILABLE, "nsys is not on the PATH")
    outcome = measure(profile_point(steps=4), CPU)
    (wall,) = (record for record in outcome.measurements if record["quantity"] == "time")
    assert order == ["time_steps", "profile"]
    assert (wall["labels"], wall["clock"], wall["n"]) == ({"phase": "forward"}, "wall", 4)
    assert values(outcome, "profiler_note") == {(): "nsys is not on the PATH"}


def test_attentions_parts_and_all_matmuls_have_costs(outcome: Outcome) -> None:
    times = values(outcome, "part_total_time", "part")
    assert set(times) == {("scores",), ("scale_and_mask",), ("softmax",), ("output",)}
    assert all(time > 0 for time in times.values())
    assert values(outcome, "part_kernels", "part")[("softmax",)] == 2
    assert values(outcome, "flops", "part")[("softmax",)] == 5 * 2 * (2 * 2 * 8 * 8)
    assert set(values(outcome, "traffic", "part")) == set(times)
    assert values(outcome, "profiler_version") == {(): f"torch profiler {torch.__version__}"}
    flops = values(outcome, "matmul_flops", "mode")
    assert flops["train_step",] == flops["forward_backward",] == 3 * flops["forward",]


@pytest.mark.parametrize(
    ("changes", "has_parts"),
    [
        ({"attention": "sdpa_math"}, False),
        ({"model": "tests.chapters.test_end_to_end:Watching"}, False),
        ({"precision": "bf16"}, True),  # autocast mixes types, so costs are not known
    ],
)
def test_costs_are_given_where_they_are_known(changes: dict[str, Any], has_parts: bool) -> None:
    outcome = measure(profile_point(**changes), CPU)
    assert bool(values(outcome, "part_total_time", "part")) == has_parts
    assert not values(outcome, "flops", "part")


def test_a_mode_that_does_not_fit_leaves_the_others_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(step: Step) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(Step, "backward", out_of_memory)
    outcome = measure(profile_point(), CPU)
    spans = [r for r in outcome.measurements if r["quantity"] == "span_time"]
    found = {r["labels"]["mode"]: r["status"] for r in spans if r["labels"]["phase"] == "total"}
    assert found == {"forward": "ok", "forward_backward": "oom", "train_step": "oom"}
    assert list(outcome.data["modes"]) == ["forward"]
    assert outcome.data["timeline"]["device_phases"]


def test_a_trace_is_kept_only_if_asked_for() -> None:
    point = profile_point(size="2.7b", keep_traces=True)
    measure(profile_point(), CPU)
    assert not Path("traces").exists()
    measure(point, CPU)
    folder = trace_folder(point)
    assert "size~2.7b" in folder.parts
    kernels = chrome_trace.read(folder / "trace.json.gz", on_cpu=True).kernels
    assert "aten::bmm" in set(kernels["name"])


def test_under_nsys_the_trace_is_left_to_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    point = profile_point(profiler="nsys")
    with pytest.raises(Unsupported, match="nsys is not recording this process"):
        measure(point, CPU)
    monkeypatch.setenv(UNDER_NSYS, "1")
    outcome = measure(point, CPU)
    assert outcome.data == {}
    assert not values(outcome, "profiler_version")
    assert values(outcome, "time", "phase").keys() == {("forward",)}


def test_a_model_too_large_is_refused_before_it_is_built() -> None:
    point = profile_point(skip_if_too_large=True, d_model=2**20, num_layers=10**4)
    with pytest.raises(Unsupported, match=r"needs about .* GiB"):
        measure(point, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_every_phase_has_kernels_and_launches_come_before_them() -> None:
    outcome = measure(profile_point(), torch.device("cuda", 0))
    kernels = values(outcome, "kernels", "mode", "phase")
    assert all(kernels["train_step", phase] for phase in ("forward", "backward", "optimizer"))
    assert values(outcome, "delay_median_time", "mode")[("train_step",)] > 0
    assert all(values(outcome, "part_kernels", "part").values())
