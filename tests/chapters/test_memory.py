"""The memory chapter on a CPU: what its points record, and how each mode or strategy can end.

Kernels of some CPUs allocate scratch memory that no model of the step knows. Comparisons with the
cost model therefore look at tensors: at the end of a phase, when scratch is gone, and at peaks
without the workspace.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.chapters.memory import measure as memory
from lmlab.chapters.memory.measure import checkpointing, timeline
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step
from lmlab.measure.memory.recorder import Recording
from lmlab.model.peak import Parts, Stage
from lmlab.study.results import SIZE_LIMIT_BYTES
from tests.jobs.points import memory_point

CPU = torch.device("cpu")
PHASES = {
    "forward": ["forward"],
    "forward_graph": ["forward"],
    "train_step": ["forward", "backward", "optimizer"],
}
TENSORS = {"parameters", "optimizer_state", "gradients", "weight_copies", "activations", "other"}


class Blockless(nn.Module):
    """A user's own model without a list of blocks."""

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


BLOCKLESS = f"{__name__}:Blockless"


def records(outcome: Outcome, quantity: str, **labels: Any) -> list[dict[str, Any]]:
    """Records of one quantity whose labels match."""
    return [
        record
        for record in outcome.measurements
        if record["quantity"] == quantity and labels.items() <= record["labels"].items()
    ]


def value(outcome: Outcome, quantity: str, **labels: Any) -> Any:
    """The value of the one record that matches."""
    (record,) = records(outcome, quantity, **labels)
    return record["value"]


def by(outcome: Outcome, label: str, quantity: str, **labels: Any) -> dict[str, Any]:
    """Values by one label."""
    found = records(outcome, quantity, **labels)
    return {record["labels"][label]: record["value"] for record in found}


def measured(**changes: Any) -> Outcome:
    return memory.measure(memory_point(**changes), CPU)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    shape = {"d_model": 32, "d_ff": 128, "context": 64, "vocab_size": 2000}
    return measured(precision=request.param, **shape)


def test_every_mode_has_a_peak_and_its_phases(outcome: Outcome) -> None:
    assert outcome.status == "ok"
    for mode, phases in PHASES.items():
        peaks = by(outcome, "phase", "phase_peak", mode=mode)
        assert list(peaks) == phases
        assert value(outcome, "peak_memory", mode=mode) == max(peaks.values())
        assert peaks[value(outcome, "peak_phase", mode=mode)] == max(peaks.values())


def test_categories_add_up_and_only_a_train_step_has_gradients(outcome: Outcome) -> None:
    for mode in PHASES:
        live = by(outcome, "category", "live", mode=mode, stage="peak")
        assert sum(live.values()) == value(outcome, "replayed_peak", mode=mode)
        curves = set(outcome.data[mode]["bytes"])
        assert ({"gradients", "optimizer_state"} <= curves) == (mode == "train_step")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_weights_are_those_of_every_layer(precision: str) -> None:
    outcome = measured(precision=precision, context=32, num_layers=3, vocab_size=2000)
    weights = by(outcome, "dtype", "attention_weights", mode="forward_graph", stage="peak")
    # 3 layers x batch 2 x 2 heads x 32 x 32; autocast on a CPU leaves softmax in 16 bits.
    assert weights == {precision: 3 * 2 * 2 * 32 * 32 * (4 if precision == "fp32" else 2)}


def test_the_prediction_counts_the_tensors_after_each_phase(outcome: Outcome) -> None:
    predicted = by(outcome, "category", "predicted_live", mode="forward_graph")
    kept = sum(predicted[category] for category in TENSORS)
    assert value(outcome, "phase_end", mode="forward_graph") == pytest.approx(kept, rel=0.02)
    parameters = 4 * value(outcome, "parameters")
    ends = by(outcome, "phase", "phase_end", mode="train_step")
    assert ends["forward"] == pytest.approx(kept + 2 * parameters, rel=0.02)
    assert ends["backward"] == pytest.approx(4 * parameters, rel=0.02)
    assert ends["optimizer"] == pytest.approx(4 * parameters, rel=0.02)


def test_the_predicted_peak_lies_between_tensors_and_tensors_with_workspace(
    outcome: Outcome,
) -> None:
    for mode in PHASES:
        predicted = value(outcome, "predicted_peak", mode=mode)
        live = by(outcome, "category", "live", mode=mode, stage="peak")
        tensors = sum(live[category] for category in TENSORS)
        assert tensors / 1.02 <= predicted <= 1.02 * sum(live.values())
        parts = by(outcome, "category", "predicted_live", mode=mode)
        for category in ("parameters", "optimizer_state"):
            assert live[category] == parts[category]


def test_a_tensor_of_the_stream_is_derived_and_found(outcome: Outcome) -> None:
    assert value(outcome, "stream_bytes") == 2 * 64 * 32 * 4
    assert all(value(outcome, "stream_allocations", mode=mode) > 0 for mode in PHASES)


def test_the_largest_allocations_have_their_origin(outcome: Outcome) -> None:
    found = records(outcome, "allocation", mode="forward_graph", phase="forward")
    assert found
    for record in found:
        labels = record["labels"]
        assert labels["total_bytes"] == labels["count"] * record["value"]
        assert labels["origin"].startswith("lmlab/") or labels["category"] == "workspace"


def test_the_result_of_48_layers_fits_into_a_file() -> None:
    outcome = measured(num_layers=48)
    content = {"measurements": outcome.measurements, "data": outcome.data}
    assert len(json.dumps(content)) < 0.9 * SIZE_LIMIT_BYTES


@pytest.mark.parametrize("changes", [{"model": BLOCKLESS}, {"attention": "sdpa_math"}])
def test_what_the_cost_model_does_not_describe_has_no_prediction(changes: dict[str, Any]) -> None:
    outcome = measured(**changes)
    assert len(records(outcome, "peak_memory")) == len(PHASES)
    assert records(outcome, "predicted_peak") == []


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no")


def test_a_mode_that_does_not_fit_leaves_the_others_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "backward", out_of_memory)
    outcome = measured()
    assert outcome.status == "ok"
    assert [record["status"] for record in records(outcome, "peak_memory")] == ["ok", "ok", "oom"]
    (failed,) = records(outcome, "peak_memory", mode="train_step")
    assert failed["value"] is None
    assert "in backward with " in failed["reason"]
    assert value(outcome, "live", mode="train_step", stage="failure", category="activations") > 0


def test_a_point_where_nothing_fits_keeps_its_records_as_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "infer", out_of_memory)
    monkeypatch.setattr(Step, "forward", out_of_memory)
    outcome = measured()
    assert (outcome.status, outcome.measurements) == ("oom", ())
    assert outcome.reason is not None
    assert outcome.reason.startswith("forward: ")
    kept = Outcome(measurements=outcome.data["records"])
    assert value(kept, "live", mode="forward", stage="failure", category="parameters") > 0


def test_any_other_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "backward", lambda step: int("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        measured()


def test_a_mode_that_cannot_fit_is_not_tried_where_the_study_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    gpu = torch.device("cuda")

    def predicted(gib: int) -> Stage:
        return Stage(phase="forward", name="loss", parts=Parts(activations=gib * 2**30))

    assert timeline.too_large(predicted(12), gpu) is None
    assert timeline.too_large(predicted(13), gpu) == "needs about 13.0 GiB, 12.0 GiB free"
    assert timeline.too_large(None, gpu) is None
    assert timeline.too_large(predicted(13), CPU) is None
    monkeypatch.setattr(timeline, "too_large", lambda *_: "needs more")
    outcome = measured(skip_if_too_large=True)
    assert (outcome.status, outcome.reason) == ("unsupported", "forward: needs more")


@pytest.mark.parametrize(
    ("asked", "failed", "kept"), [(False, None, False), (True, None, True), (False, "no", True)]
)
def test_snapshots_are_kept_where_asked_and_where_memory_ran_out(
    asked: bool, failed: str | None, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recording = Recording.__new__(Recording)
    vars(recording).update(snapshot={"segments": [1]}, out_of_memory=failed)
    path = timeline.save_snapshot(recording, memory_point(keep_snapshots=asked), "train_step")
    assert (path is not None) == kept
    if path is not None:
        assert pickle.loads((tmp_path / path).read_bytes()) == {"segments": [1]}


def strategies(**changes: Any) -> Outcome:
    names = "none,every-1,every-2,nested"
    shape = {"num_layers": 4, "context": 32, "d_model": 32, "d_ff": 128, "steps": 2}
    point = memory_point("checkpointing", **{"strategies": names, **shape, **changes})
    return memory.measure(point, CPU)


@pytest.fixture(scope="module")
def compared() -> Outcome:
    return strategies()


def test_every_strategy_has_a_time_a_peak_and_a_prediction(compared: Outcome) -> None:
    names = ["none", "every-1", "every-2", "nested"]
    assert list(by(compared, "variant", "time")) == names
    assert min(by(compared, "variant", "time").values()) > 0
    peaks = by(compared, "variant", "peak_memory")
    predicted = by(compared, "variant", "predicted_peak")
    assert list(predicted) == [*names, "best predicted"]
    assert all(predicted[name] <= 1.02 * peaks[name] for name in names)
    (best,) = records(compared, "predicted_peak", variant="best predicted")
    assert best["labels"]["blocks"] == 1


def test_fewer_saved_activations_are_a_lower_peak(compared: Outcome) -> None:
    peaks = by(compared, "variant", "peak_memory")
    assert peaks["every-1"] < peaks["every-2"] < peaks["none"]
    assert peaks["nested"] <= 1.01 * peaks["every-1"]
    saved = by(compared, "variant", "saved_for_backward")
    assert saved["every-1"] - saved["every-2"] == 2 * value(compared, "stream_bytes")
    assert saved["every-2"] == saved["nested"]


def test_a_strategy_that_does_not_fit_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpointing._fill_allocator

    def fill(variant: Any, *rest: Any) -> None:
        if variant.name == "none":
            out_of_memory()
        real(variant, *rest)

    monkeypatch.setattr(checkpointing, "_fill_allocator", fill)
    outcome = strategies(strategies="none,every-1")
    none, every = records(outcome, "time")
    assert (none["status"], none["value"], every["status"]) == ("oom", None, "ok")
    assert [r["status"] for r in records(outcome, "peak_memory")] == ["oom", "ok"]


def test_a_strategy_with_other_gradients_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpointing._gradient_norms

    def wrong(variant: Any, *rest: Any) -> Tensor:
        return real(variant, *rest) * (1.01 if variant.name == "nested" else 1.0)

    monkeypatch.setattr(checkpointing, "_gradient_norms", wrong)
    none, nested = records(strategies(strategies="none,nested"), "time")
    assert (none["status"], nested["status"], nested["value"]) == ("ok", "failed", None)
    assert "1.0e-02" in nested["reason"]


def test_a_time_cap_leaves_every_strategy_one_visit() -> None:
    outcome = strategies(rounds=50, time_cap_s=1e-9, strategies="none,every-1")
    assert [record["n"] for record in records(outcome, "time")] == [2, 2]


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    with pytest.raises(Unsupported, match="Blockless has no list of blocks `layers`"):
        strategies(model=BLOCKLESS)
