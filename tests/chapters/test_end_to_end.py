"""End to end: the phases of each mode, what a step consists of, and whose model it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.chapters.end_to_end import measure as end_to_end
from lmlab.jobs import workload
from lmlab.jobs.catalog import points_of
from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.workload import Step, workload_of
from lmlab.measure.device_time import PROFILED_STEPS
from lmlab.model import cost
from lmlab.model.shape import ModelShape
from lmlab.study.config import load
from lmlab.study.config_file import read
from lmlab.study.files import ROOT
from tests.chapters.pages import found, value_of
from tests.jobs.points import end_to_end_point

PHASES = {
    "forward": ["forward"],
    "forward_backward": ["forward", "backward"],
    "train_step": ["zero_grad", "forward", "backward", "optimizer"],
}
CONFIG = ROOT / "config.yaml"
MODES = pytest.mark.parametrize("mode", PHASES)
SHAPE = ModelShape(
    vocab_size=17, context=8, batch=2, d_model=16, d_ff=24, num_layers=2, num_heads=2
)

OWN_MODEL = """
from torch import nn


class Model(nn.Module):
    def __init__(
        self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta{more}
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""


class Watching(nn.Module):
    """A model that notes what is switched on while it runs forward and backward."""

    seen: dict[str, tuple[str, bool]]

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 4)
        self.head = nn.Linear(4, vocab_size)
        type(self).seen = {}

    def forward(self, tokens: Tensor) -> Tensor:
        self._note("forward")
        logits: Tensor = self.head(self.embedding(tokens))
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self._note("backward"))
        return logits

    def _note(self, when: str) -> None:
        switches = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
        type(self).seen[when] = switches


WATCHING = f"{__name__}:Watching"


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the user's own on the path, forgotten afterwards."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]


def test_the_grid_has_its_points_once_and_checks_some_of_them() -> None:
    config = read(CONFIG)
    block = config["studies"]["nano"]["end_to_end"]
    check = {"size": "cpu-small", "context": 8, "precision": "bf16", "batch": 2}
    block |= {"modes": ["forward_backward"], "graph_checks": [check], "steps": 3, "max_steps": 9}
    block |= {"more": [{"contexts": [8, 16]}, {"batches": [1], "precisions": ["fp32"]}]}
    found = points_of(load({**config, "study": "nano"}, "cuda"), "end_to_end")
    warm = [point for point in found if point.parameters["start"] == "warm"]
    axes = [tuple(point.parameters[key] for key in check) for point in warm]
    assert axes == [
        *(("cpu-small", 16, precision, 2) for precision in ("fp32", "bf16")),
        *(("cpu-small", 8, precision, 2) for precision in ("fp32", "bf16")),
        ("cpu-small", 16, "fp32", 1),
    ]
    assert [point.settings["graph_replay"] for point in warm] == [False, False, False, True, False]
    assert {point.settings["max_steps"] for point in warm} == {9}
    assert all("max_steps" not in point.settings for point in found if point not in warm)
    block["max_steps"] = 2
    with pytest.raises(ValueError, match=r"end_to_end.max_steps = 2; allowed: at least steps = 3"):
        points_of(load({**config, "study": "nano"}, "cuda"), "end_to_end")


@MODES
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


def test_fp32_is_fp32_whatever_was_allowed_before(cpu: torch.device) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        outcome = end_to_end.measure(end_to_end_point(model=WATCHING), cpu)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert Watching.seen == {"forward": ("highest", False), "backward": ("highest", False)}
    assert value_of(outcome, "tf32") is False


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"precision": "bf16"}, {"forward": ("highest", True), "backward": ("highest", False)}),
        ({"mode": "forward"}, {"forward": ("highest", False)}),
    ],
    ids=["autocast covers forward and not backward", "forward alone keeps no graph"],
)
def test_what_runs_under_which_switches(
    changes: dict[str, str], seen: dict[str, tuple[str, bool]], cpu: torch.device
) -> None:
    end_to_end.measure(end_to_end_point(model=WATCHING, **changes), cpu)
    assert Watching.seen == seen


@pytest.mark.parametrize("mode", ["forward_backward", "train_step"])
def test_gradients_do_not_pile_up_over_steps(mode: str, cpu: torch.device) -> None:
    asked = workload_of(end_to_end_point(mode=mode))
    model = asked.build(cpu)
    step = Step(asked, model, cpu)
    norms = []
    for _ in range(2):
        end_to_end.prepare(step, step.phases())
        for name, run in step.phases():
            if name != "optimizer":
                run()
        norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
    assert norms[1] == pytest.approx(norms[0])


def test_a_train_step_changes_the_weights(cpu: torch.device) -> None:
    asked = workload_of(end_to_end_point())
    model = asked.build(cpu)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _, run in Step(asked, model, cpu).phases():
        run()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_seed_gives_the_same_weights_and_tokens(cpu: torch.device) -> None:
    first, second, other = (workload_of(end_to_end_point(seed=seed)) for seed in (1, 1, 2))
    made = [(each.batch(cpu)[0], next(each.build(cpu).parameters())) for each in (first, second)]
    for one, same, differs in zip(
        *made, (other.batch(cpu)[0], next(other.build(cpu).parameters())), strict=True
    ):
        assert torch.equal(one, same)
        assert not torch.equal(one, differs)
    tokens, targets = first.batch(cpu)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]), "targets are the tokens that follow"
    assert int(tokens.max()) < 17


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(", *, attention, device=None", id="like ours"),
        pytest.param("", id="without attention or device"),
        pytest.param(", **rest", id="taking anything"),
    ],
)
def test_a_users_own_model_is_measured(own_package: Path, more: str, cpu: torch.device) -> None:
    (own_package / "model.py").write_text(OWN_MODEL.format(more=more))
    outcome = end_to_end.measure(end_to_end_point(model="own_package.model:Model"), cpu)
    assert len(found(outcome, "time")) == len(PHASES["train_step"]) + 1
    assert found(outcome, "flops") == []
    assert value_of(outcome, "parameters") == 17 * 16 + 16 * 17 + 17


def test_an_attention_that_a_model_cannot_take_is_unsupported(
    own_package: Path, cpu: torch.device
) -> None:
    (own_package / "model.py").write_text(OWN_MODEL.format(more=""))
    point = end_to_end_point(model="own_package.model:Model", attention="elsewhere:attention")
    with pytest.raises(Unsupported, match="takes no attention argument"):
        end_to_end.measure(point, cpu)


HUGE = {"d_model": 1 << 16, "d_ff": 1 << 20, "num_layers": 96, "num_heads": 1 << 9}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "tf32"}, "tf32"),
        ({**HUGE, "skip_if_too_large": True}, r"needs about [\d.]+ GiB, [\d.]+ GiB free"),
    ],
    ids=["a precision that the device lacks", "a point that cannot fit, if the study says so"],
)
def test_what_cannot_run_is_unsupported(
    changes: dict[str, Any], reason: str, cpu: torch.device
) -> None:
    with pytest.raises(Unsupported, match=reason):
        end_to_end.measure(end_to_end_point(**changes), cpu)


def test_only_what_the_cost_model_describes_is_judged_by_it(
    monkeypatch: pytest.MonkeyPatch, cpu: torch.device
) -> None:
    monkeypatch.setattr(end_to_end, "free_memory_bytes", lambda device: 0)
    with pytest.raises(Unsupported):
        end_to_end.refuse_if_too_large(workload_of(end_to_end_point()), cpu)
    end_to_end.refuse_if_too_large(workload_of(end_to_end_point(model=WATCHING)), cpu)
    end_to_end.refuse_if_too_large(workload_of(end_to_end_point(attention="a:b")), cpu)


def test_a_point_that_fits_is_not_skipped(cpu: torch.device) -> None:
    assert end_to_end.measure(end_to_end_point(skip_if_too_large=True), cpu).status == "ok"


def test_a_point_that_cannot_fit_is_tried_otherwise(
    monkeypatch: pytest.MonkeyPatch, cpu: torch.device
) -> None:
    def build(self: workload.Workload, device: torch.device) -> nn.Module:
        raise torch.OutOfMemoryError("tried")

    monkeypatch.setattr(workload.Workload, "build", build)
    with pytest.raises(torch.OutOfMemoryError, match="tried"):
        end_to_end.measure(end_to_end_point(**HUGE), cpu)


def test_a_graph_that_cannot_be_captured_costs_only_the_check(
    monkeypatch: pytest.MonkeyPatch, cpu: torch.device
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(end_to_end, "graph_replay_records", refuse)
    point = end_to_end_point()
    outcome = end_to_end.measure(
        replace(point, settings={**point.settings, "graph_replay": True}), cpu
    )
    (record,) = found(outcome, "graph_replay_time")
    assert record["status"] == "failed"
    assert record["reason"] == "operation not permitted when stream is capturing"
    assert found(outcome, "time")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_says_how_busy_it_was_and_how_much_it_held() -> None:
    device = torch.device("cuda", 0)
    outcome = end_to_end.measure(end_to_end_point(), device)
    busy = {
        record["labels"]["phase"]: record["value"]
        for record in found(outcome, "time")
        if record["clock"] == "device"
    }
    assert set(busy) == {*PHASES["train_step"], "total"}
    assert {r["n"] for r in found(outcome, "time") if r["clock"] == "device"} == {PROFILED_STEPS}
    assert busy["total"] > busy["forward"] > 0
    assert value_of(outcome, "peak_memory") > 4 * value_of(outcome, "parameter_bytes")
