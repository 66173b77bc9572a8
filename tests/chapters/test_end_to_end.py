"""End to end: the phases of each mode, what a step consists of, and whose model it is."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lmlab.chapters.end_to_end import measure as end_to_end
from lmlab.jobs import workload
from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.workload import Step, workload_of
from lmlab.measure.device_time import PROFILED_STEPS
from lmlab.measure.precision import tf32_allowed
from lmlab.model import cost
from lmlab.model.shape import ModelShape
from tests.chapters.pages import found, value_of
from tests.jobs.points import end_to_end_point

PHASES = {
    "forward": ["forward"],
    "forward_backward": ["forward", "backward"],
    "train_step": ["zero_grad", "forward", "backward", "optimizer"],
}
SHAPE = ModelShape(
    vocab_size=17, context=8, batch=2, d_model=16, d_ff=24, num_layers=2, num_heads=2
)


class Plain(nn.Module):
    """A user's model that takes a shape and neither attention nor device."""

    def __init__(
        self, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int,
        d_ff: int, rope_theta: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 4)
        self.head = nn.Linear(4, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


class Watching(Plain):
    """A model that takes anything, and notes what is switched on while it runs."""

    seen: dict[str, tuple[str, bool]]

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__(vocab_size, 0, 0, 0, 0, 0, 0.0)
        type(self).seen = {}

    def forward(self, tokens: Tensor) -> Tensor:
        self._note("forward")
        logits = super().forward(tokens)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self._note("backward"))
        return logits

    def _note(self, when: str) -> None:
        switches = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
        type(self).seen[when] = switches


PLAIN, WATCHING = f"{__name__}:Plain", f"{__name__}:Watching"


@pytest.mark.parametrize("mode", PHASES)
def test_a_mode_has_its_phases_and_a_total(mode: cost.Mode, cpu: torch.device) -> None:
    outcome = end_to_end.measure(end_to_end_point(mode=mode, warmup=2), cpu)
    times = {record["labels"]["phase"]: record for record in found(outcome, "time")}
    assert list(times) == [*PHASES[mode], "total"]
    assert all(record["n"] == 3 and record["clock"] == "wall" for record in times.values())
    for step, whole in enumerate(times["total"]["samples"]):
        assert 0 < sum(times[name]["samples"][step] for name in PHASES[mode]) <= whole
    assert all(record["n"] == 2 for record in found(outcome, "warmup_time"))
    flops = cost.flops(SHAPE, mode=mode, convention="full")
    assert flops == {
        phase: {kind: value_of(outcome, "flops", phase=phase, kind=kind) for kind in kinds}
        for phase, kinds in flops.items()
    }


def test_records_describe_the_step(cpu: torch.device) -> None:
    outcome = end_to_end.measure(end_to_end_point(), cpu)
    parameters = cost.parameter_count(SHAPE).total
    assert value_of(outcome, "tokens") == 2 * 8
    assert value_of(outcome, "parameters") == parameters
    assert value_of(outcome, "parameter_bytes") == 4 * parameters
    assert value_of(outcome, "threads") == torch.get_num_threads()
    assert value_of(outcome, "init_time") > 0
    # A CPU has neither device time nor a peak counter.
    assert found(outcome, "time", clock="device") == found(outcome, "peak_memory") == []


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, {"forward": ("highest", False), "backward": ("highest", False)}),
        ({"precision": "bf16"}, {"forward": ("highest", True), "backward": ("highest", False)}),
        ({"mode": "forward"}, {"forward": ("highest", False)}),
    ],
    ids=["fp32 is fp32", "autocast covers forward alone", "forward alone keeps no graph"],
)
def test_what_runs_under_which_switches(
    changes: dict[str, str], seen: dict[str, tuple[str, bool]], cpu: torch.device
) -> None:
    with tf32_allowed(True):  # whatever was allowed before
        outcome = end_to_end.measure(end_to_end_point(model=WATCHING, **changes), cpu)
    assert Watching.seen == seen
    assert value_of(outcome, "tf32") is False


@pytest.mark.parametrize("mode", ["forward_backward", "train_step"])
def test_gradients_are_cleared_and_the_optimizer_uses_them(mode: str, cpu: torch.device) -> None:
    asked = workload_of(end_to_end_point(mode=mode))
    model = asked.build(cpu)
    step = Step(asked, model, cpu)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    norms = []
    for _ in range(2):
        end_to_end.prepare(step, step.phases())
        for name, run in step.phases():
            if name != "optimizer":
                run()
        norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
    assert norms[1] == pytest.approx(norms[0])
    dict(step.phases()).get("optimizer", lambda: None)()
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert set(same) == {mode != "train_step"}


def test_a_seed_gives_the_same_weights_and_tokens(cpu: torch.device) -> None:
    points = [workload_of(end_to_end_point(seed=seed)) for seed in (1, 1, 2)]
    made = [(each.batch(cpu)[0], next(each.build(cpu).parameters())) for each in points]
    for one, same, differs in zip(*made, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, differs)
    tokens, targets = points[0].batch(cpu)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]), "targets are the tokens that follow"
    assert int(tokens.max()) < 17


@pytest.mark.parametrize("model", [PLAIN, WATCHING], ids=["a shape", "anything"])
def test_a_users_own_model_is_measured(model: str, cpu: torch.device) -> None:
    outcome = end_to_end.measure(end_to_end_point(model=model), cpu)
    assert len(found(outcome, "time")) == len(PHASES["train_step"]) + 1
    assert found(outcome, "flops") == []
    assert value_of(outcome, "parameters") == 17 * 4 + 4 * 17 + 17


def test_an_attention_that_a_model_cannot_take_is_unsupported(cpu: torch.device) -> None:
    with pytest.raises(Unsupported, match="takes no attention argument"):
        end_to_end.measure(end_to_end_point(model=PLAIN, attention="elsewhere:attention"), cpu)


HUGE = {"d_model": 1 << 16, "d_ff": 1 << 20, "num_layers": 96, "num_heads": 1 << 9}


def test_what_cannot_fit_may_be_refused(monkeypatch: pytest.MonkeyPatch, cpu: torch.device) -> None:
    assert end_to_end.measure(end_to_end_point(skip_if_too_large=True), cpu).status == "ok"
    with pytest.raises(Unsupported, match=r"needs about [\d.]+ GiB, [\d.]+ GiB free"):
        end_to_end.measure(end_to_end_point(**HUGE, skip_if_too_large=True), cpu)
    # Only what the cost model describes is judged by it.
    monkeypatch.setattr(end_to_end, "free_memory_bytes", lambda device: 0)
    with pytest.raises(Unsupported):
        end_to_end.refuse_if_too_large(workload_of(end_to_end_point()), cpu)
    for changes in ({"model": WATCHING}, {"attention": "a:b"}):
        end_to_end.refuse_if_too_large(workload_of(end_to_end_point(**changes)), cpu)
    # Otherwise it is tried.
    tried = Mock(side_effect=torch.OutOfMemoryError("tried"))
    monkeypatch.setattr(workload.Workload, "build", tried)
    with pytest.raises(torch.OutOfMemoryError, match="tried"):
        end_to_end.measure(end_to_end_point(**HUGE), cpu)


def test_a_failed_capture_costs_a_check(monkeypatch: pytest.MonkeyPatch, cpu: torch.device) -> None:
    error = RuntimeError("operation not permitted\nwhen stream is capturing")
    monkeypatch.setattr(end_to_end, "graph_replay_records", Mock(side_effect=error))
    point = end_to_end_point()
    captured = replace(point, settings={**point.settings, "graph_replay": True})
    outcome = end_to_end.measure(captured, cpu)
    (record,) = found(outcome, "graph_replay_time")
    assert record["status"] == "failed"
    assert record["reason"] == "operation not permitted when stream is capturing"
    assert found(outcome, "time")


@pytest.mark.gpu
def test_a_gpu_has_busy_times_and_a_peak() -> None:
    outcome = end_to_end.measure(end_to_end_point(), torch.device("cuda", 0))
    device_times = [r for r in found(outcome, "time") if r["clock"] == "device"]
    busy = {record["labels"]["phase"]: record["value"] for record in device_times}
    assert set(busy) == {*PHASES["train_step"], "total"}
    assert {record["n"] for record in device_times} == {PROFILED_STEPS}
    assert busy["total"] > busy["forward"] > 0
    assert value_of(outcome, "peak_memory") > 4 * value_of(outcome, "parameter_bytes")
