"""The memory chapter on the CPU: what its points hold, and how each mode can end."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.chapters.memory import measure as memory
from lmlab.chapters.memory.measure import checkpointing as memory_checkpointing
from lmlab.chapters.memory.measure import timeline as memory_modes
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step
from lmlab.measure.memory.recorder import Recording
from tests.jobs.points import memory_point

MODES = ("forward", "forward_graph", "train_step")


class Blockless(nn.Module):
    """A model of a user's own that has no list of blocks."""

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


BLOCKLESS = f"{__name__}:Blockless"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return memory.measure(memory_point(precision="bf16"), torch.device("cpu"))


def test_a_point_holds_every_mode(outcome: Outcome) -> None:
    assert outcome.status == "ok"
    assert tuple(outcome.data["modes"]) == MODES
    assert {mode["status"] for mode in outcome.data["modes"].values()} == {"ok"}


def test_only_a_train_step_has_gradients_and_optimizer_state(outcome: Outcome) -> None:
    for name, mode in outcome.data["modes"].items():
        curves = set(mode["timeline"]["bytes"])
        assert ({"gradients", "optimizer_state"} <= curves) == (name == "train_step")
        assert "weight_copies" in curves


def test_phases_are_those_of_the_mode(outcome: Outcome) -> None:
    phases = {
        name: [phase["name"] for phase in mode["phases"]]
        for name, mode in outcome.data["modes"].items()
    }
    assert phases == {
        "forward": ["forward"],
        "forward_graph": ["forward"],
        "train_step": ["forward", "backward", "optimizer"],
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("context", [8, 64])
def test_the_prediction_is_the_measured_peak(precision: str, context: int) -> None:
    shape = {"d_model": 32, "d_ff": 128, "context": context, "vocab_size": 200}
    point = memory_point(precision=precision, **shape)
    # On some CPUs a small product packs its weights first, which no model of the step knows.
    packed = 4 * shape["d_model"] * max(shape["d_ff"], shape["vocab_size"])
    for mode in memory.measure(point, torch.device("cpu")).data["modes"].values():
        measured = mode["live_categories_bytes"]
        predicted, replayed = mode["predicted"]["bytes"], mode["replayed_bytes"]
        assert (replayed - packed) / 1.05 <= predicted <= replayed * 1.05
        for category in ("parameters", "optimizer_state", "weight_copies"):
            assert mode["predicted"]["categories_bytes"][category] == pytest.approx(
                measured[category], rel=0.1
            )


def test_the_warm_ups_graph_is_not_there_any_more() -> None:
    """The step before keeps its graph until its own end; two graphs would be twice the peak."""
    modes = memory.measure(memory_point(context=64), torch.device("cpu")).data["modes"]
    kept = modes["forward_graph"]["live_categories_bytes"]["activations"]
    predicted = modes["forward_graph"]["predicted"]["categories_bytes"]["activations"]
    assert kept == pytest.approx(predicted, rel=0.05)


def test_one_tensor_of_the_stream_is_derived_and_found(outcome: Outcome) -> None:
    assert outcome.data["stream_bytes"] == 2 * 8 * 16 * 4
    for mode in outcome.data["modes"].values():
        assert mode["stream"]["bytes"] == outcome.data["stream_bytes"]
        assert mode["stream"]["allocated"] > 0


def test_the_result_of_48_layers_fits_into_a_file() -> None:
    point = memory_point(num_layers=48)
    data = memory.measure(point, torch.device("cpu")).data
    assert len(json.dumps(data)) < 150_000


def test_what_the_cost_model_does_not_describe_has_no_prediction() -> None:
    data = memory.measure(memory_point(model=BLOCKLESS), torch.device("cpu")).data
    assert [mode["predicted"] for mode in data["modes"].values()] == [None] * 3


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no")


def test_a_mode_that_does_not_fit_leaves_the_others_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "backward", out_of_memory)
    outcome = memory.measure(memory_point(), torch.device("cpu"))
    statuses = [mode["status"] for mode in outcome.data["modes"].values()]
    assert (outcome.status, statuses) == ("ok", ["ok", "ok", "oom"])
    failed = outcome.data["modes"]["train_step"]
    assert failed["reason"].startswith("failed outside the allocator in backward with ")
    assert failed["live_categories_bytes"]["activations"] > 0


def test_a_point_where_nothing_fits_is_out_of_memory_and_still_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "infer", out_of_memory)
    monkeypatch.setattr(Step, "forward", out_of_memory)
    outcome = memory.measure(memory_point(), torch.device("cpu"))
    assert outcome.status == "oom"
    assert outcome.reason is not None
    assert outcome.reason.startswith("forward: ")
    assert outcome.data["modes"]["forward"]["live_categories_bytes"]["parameters"] > 0


def test_another_error_is_the_points_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: Step) -> None:
        raise ValueError("wrong")

    monkeypatch.setattr(Step, "backward", fail)
    with pytest.raises(ValueError, match="wrong"):
        memory.measure(memory_point(), torch.device("cpu"))


def test_a_mode_that_cannot_fit_is_not_tried_where_the_study_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    gpu = torch.device("cuda")
    assert memory_modes._too_large({"bytes": 12 * 2**30}, gpu) is None
    reason = memory_modes._too_large({"bytes": 13 * 2**30}, gpu)
    assert reason == "needs about 13.0 GiB, 12.0 GiB free"
    assert memory_modes._too_large(None, gpu) is None
    monkeypatch.setattr(memory_modes, "_too_large", lambda *_: "needs more")
    outcome = memory.measure(memory_point(skip_if_too_large=True), torch.device("cpu"))
    assert (outcome.status, outcome.reason) == ("unsupported", "forward: needs more")


@pytest.mark.parametrize(
    ("asked", "failed", "kept"), [(False, None, False), (True, None, True), (False, "no", True)]
)
def test_snapshots_are_kept_where_asked_and_where_memory_ran_out(
    asked: bool,
    failed: str | None,
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    recording = Recording.__new__(Recording)
    vars(recording).update(snapshot={"segments": [1]}, out_of_memory=failed)
    path = memory_modes._keep(recording, memory_point(keep_snapshots=asked), "train_step")
    assert (path is not None) == kept
    if path is not None:
        assert path.startswith("snapshots/")
        assert pickle.loads((tmp_path / path).read_bytes()) == {"segments": [1]}


def test_tf32_is_nothing_that_a_cpu_has() -> None:
    with pytest.raises(Unsupported, match="tf32"):
        memory.measure(memory_point(precision="tf32"), torch.device("cpu"))


def checkpointing(**changes: Any) -> Outcome:
    strategies = "none,every-1,every-2,nested"
    shape = {"num_layers": 4, "context": 32, "d_model": 32, "d_ff": 128, "steps": 2}
    point = memory_point("checkpointing", **{"strategies": strategies, **shape, **changes})
    return memory.measure(point, torch.device("cpu"))


@pytest.fixture(scope="module")
def strategies() -> Outcome:
    return checkpointing()


def test_every_strategy_has_a_time_a_peak_and_a_prediction(strategies: Outcome) -> None:
    assert list(strategies.measurements) == ["none", "every-1", "every-2", "nested"]
    for arm in strategies.data["arms"]:
        assert arm["status"] == "ok"
        assert arm["median_ms"] > 0
        assert arm["predicted"]["bytes"] == pytest.approx(arm["peak_bytes"], rel=0.02)


def test_fewer_kept_activations_are_a_lower_peak(strategies: Outcome) -> None:
    peaks = {arm["name"]: arm["peak_bytes"] for arm in strategies.data["arms"]}
    assert peaks["every-1"] < peaks["every-2"] < peaks["none"]
    assert peaks["nested"] <= peaks["every-1"]
    kept = {arm["name"]: arm["kept_bytes"] for arm in strategies.data["arms"]}
    stream = 2 * 32 * 32 * 4
    assert kept["every-1"] - kept["every-2"] == 2 * stream
    assert kept["every-2"] == kept["nested"]
    assert strategies.data["best_predicted"]["blocks"] == 1


def test_a_strategy_that_does_not_fit_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory_checkpointing._fill_allocator

    def fill(arm: Any, *rest: Any) -> None:
        if arm.name == "none":
            out_of_memory()
        real(arm, *rest)

    monkeypatch.setattr(memory_checkpointing, "_fill_allocator", fill)
    outcome = checkpointing(strategies="none,every-1")
    none, every = outcome.data["arms"]
    assert (none["status"], none["reason"], none["peak_bytes"]) == ("oom", "did not fit", None)
    assert every["status"] == "ok"
    assert list(outcome.measurements) == ["every-1"]


def test_a_strategy_with_other_gradients_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory_checkpointing._gradient_norms

    def wrong(arm: Any, *rest: Any) -> Tensor:
        return real(arm, *rest) * (1.01 if arm.name == "nested" else 1.0)

    monkeypatch.setattr(memory_checkpointing, "_gradient_norms", wrong)
    outcome = checkpointing(strategies="none,nested")
    assert outcome.data["arms"][1]["status"] == "failed"
    assert "gradients differ from those of none by 1.0e-02" in outcome.data["arms"][1]["reason"]
    assert list(outcome.measurements) == ["none"]


def test_a_time_cap_leaves_every_strategy_one_visit() -> None:
    outcome = checkpointing(rounds=50, time_cap_s=1e-9, strategies="none,every-1")
    assert [len(m.samples_ms) for m in outcome.measurements.values()] == [2, 2]


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    with pytest.raises(Unsupported, match="Blockless has no list of blocks `layers`"):
        checkpointing(model=BLOCKLESS)
