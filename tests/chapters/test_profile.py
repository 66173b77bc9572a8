"""Profile: one capture of three modes, the clock read before, and who may record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.profile import measure as profile
from lmlab.chapters.profile.measure import measure, trace_folder
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.trace import chrome_trace, recording
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE, UNDER_NSYS
from tests.jobs.points import profile_point

CPU = torch.device("cpu")
PRODUCTS = 2 * 9 + 1  # 7 projections and 2 in attention a layer, and the head


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(UNDER_NSYS, raising=False)
    monkeypatch.delenv(NSYS_UNAVAILABLE, raising=False)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measure(profile_point(), CPU)


def of_mode(outcome: Outcome, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = outcome.data["modes"][mode]
    return found


def test_each_mode_runs_what_it_says(outcome: Outcome) -> None:
    products = {
        mode: digest["families"]["matmul"]["instances"]
        for mode, digest in outcome.data["modes"].items()
    }
    assert products == {
        "forward": PRODUCTS,
        "forward_backward": 3 * PRODUCTS,
        "train_step": 3 * PRODUCTS,
    }
    assert "optimizer" not in of_mode(outcome, "forward_backward")["families"]
    assert of_mode(outcome, "train_step")["families"]["optimizer"]["instances"] > 0


def test_every_kernel_stands_in_a_phase(outcome: Outcome) -> None:
    for digest in outcome.data["modes"].values():
        assert sum(row["kernels"] for row in digest["phases"]) == digest["kernels"]
        assert sum(row["total_ns"] for row in digest["phases"]) == digest["total_ns"]


def test_the_forward_pass_is_timed_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    plain_time, plain_profile = profile.time_steps, profile.profile

    def time_steps(*args: Any) -> Any:
        order.append("timed")
        return plain_time(*args)

    def profiled(*args: Any, **kwargs: Any) -> Any:
        order.append("profiled")
        return plain_profile(*args, **kwargs)

    monkeypatch.setattr(profile, "time_steps", time_steps)
    monkeypatch.setattr(profile, "profile", profiled)
    outcome = measure(profile_point(steps=4), CPU)
    assert order == ["timed", "profiled"]
    assert len(outcome.measurements["forward"].samples_ms) == 4
    assert list(outcome.measurements) == ["forward"]


def test_attention_is_cut_into_parts_with_what_they_cost(outcome: Outcome) -> None:
    parts = {row["part"]: row for row in outcome.data["attention_parts"]}
    assert set(parts) == set(outcome.data["attention_cost"])
    assert all(row["total_ns"] > 0 for row in parts.values())
    assert parts["softmax"]["kernels"] == 2
    assert outcome.data["attention_cost"]["softmax"]["flops"] == 5 * 2 * (2 * 2 * 8 * 8)


def test_a_fused_attention_has_no_parts_and_no_cost() -> None:
    data = measure(profile_point(attention="sdpa_math"), CPU).data
    assert data["attention_parts"] is None
    assert data["attention_cost"] is None


def test_under_autocast_types_mix_and_nothing_is_counted() -> None:
    data = measure(profile_point(precision="bf16"), CPU).data
    assert data["autocast"]
    assert data["attention_cost"] is None
    assert data["attention_parts"] is not None


def test_the_result_says_who_recorded_it(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome.data["tool"] == f"torch profiler {torch.__version__}"
    assert outcome.data["tool_note"] is None
    monkeypatch.setenv(NSYS_UNAVAILABLE, "nsys is not on the PATH")
    assert measure(profile_point(), CPU).data["tool_note"] == "nsys is not on the PATH"


def test_a_trace_is_kept_only_when_asked_for() -> None:
    measure(profile_point(), CPU)
    assert not Path("traces").exists()
    point = profile_point(keep_traces=True)
    measure(point, CPU)
    kept = trace_folder(point) / "trace.json.gz"
    assert "aten::bmm" in set(chrome_trace.read(kept, on_cpu=True).kernels["name"])


def test_nsys_must_have_been_started_around_the_process() -> None:
    with pytest.raises(Unsupported, match="nsys does not record this process"):
        measure(profile_point(profiler="nsys"), CPU)


def test_under_nsys_the_report_is_left_to_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNDER_NSYS, "1")
    outcome = measure(profile_point(profiler="nsys"), CPU)
    assert "modes" not in outcome.data
    assert outcome.data["attention_cost"] is not None
    assert len(outcome.measurements["forward"].samples_ms) == 3


def test_a_gpus_capture_begins_after_all_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(recording, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: order.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: order.append("stop"))
    recording.capture(lambda: order.append("run"), device=torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        recording.capture(lambda: 1 / 0, device=torch.device("cuda"))
    assert order == ["start", "run", "stop", "start", "stop"]


def test_a_model_too_large_is_refused_before_it_is_built() -> None:
    point = profile_point(skip_if_too_large=True, d_model=2**20, num_layers=10**4)
    with pytest.raises(Unsupported, match=r"needs about .* GiB"):
        measure(point, CPU)


def test_a_model_of_the_users_own_is_profiled_without_parts() -> None:
    data = measure(profile_point(model="tests.chapters.test_end_to_end:Watching"), CPU).data
    assert data["attention_parts"] is None
    assert data["attention_cost"] is None
    assert data["layer"] is None


def test_the_trace_lies_beside_the_result_of_its_point() -> None:
    folder = trace_folder(profile_point(size="2.7b"))
    assert folder.parts[0] == "traces"
    assert folder.parts[2:] == (
        *("profile", "size~2.7b", "context~8", "batch~2", "precision~fp32"),
        "attention~naive.trace",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_kernels_of_all_phases_are_found_and_the_host_waits_at_the_end() -> None:
    outcome = measure(profile_point(), torch.device("cuda", 0))
    step = of_mode(outcome, "train_step")
    assert all(row["kernels"] > 0 for row in step["phases"] if row["phase"] != "zero_grad")
    assert sum(row["total_ns"] for row in step["phases"]) == step["total_ns"]
    assert step["host"]["waits"][0]["after"] == "optimizer"
    assert step["host"]["delay_median_ns"] > 0
    assert [row["part"] for row in outcome.data["attention_parts"] if row["kernels"]] == [
        *("scores", "scale_and_mask", "softmax", "output")
    ]
