"""A real train step under the PyTorch profiler: phases, self times, layers; on a GPU if any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmlab.measure.trace import chrome_trace, gpu_time, recording, summary
from lmlab.measure.trace.annotate import annotated
from lmlab.measure.trace.frames import CPU, Trace
from lmlab.measure.trace.ranges import named
from lmlab.measure.trace.recording import profile
from lmlab.model.adamw import AdamW
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import TransformerLM

PHASES = ["forward", "backward", "optimizer"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def train_step(model: TransformerLM, device: torch.device) -> Callable[[], None]:
    tokens = torch.randint(0, 50, (2, 16), device=device)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        with named("forward"):
            loss = cross_entropy(model(tokens), tokens)
        with named("backward"):
            loss.backward()
        with named("optimizer"):
            optimizer.step()

    return step


def profiled_step(device: torch.device) -> Trace:
    model = TransformerLM(50, 16, 32, 2, 2, 64, device=device)
    step = train_step(model, device)
    step()
    with annotated(model, attention_in_parts=True):
        return profile(step, device=device)


@pytest.fixture(scope="module")
def cpu_trace() -> Trace:
    return profiled_step(torch.device("cpu"))


def test_every_operator_is_in_its_phase_with_the_expected_family(cpu_trace: Trace) -> None:
    kernels = cpu_trace.kernels
    counts = Counter(zip([path[0] for path in kernels["ranges"]], kernels["family"], strict=True))
    assert {phase for phase, _ in counts} == set(PHASES)
    # Two layers of 7 products and 2 in attention, and the head; each twice in the backward pass.
    assert counts["forward", "matmul"] == 2 * 9 + 1
    assert counts["backward", "matmul"] == 2 * counts["forward", "matmul"]
    assert counts["forward", "softmax"] == counts["backward", "softmax"] == 2
    assert [phase for phase, family in counts if family == "optimizer"] == ["optimizer"]
    softmax = kernels[kernels["name"] == "aten::_softmax"]
    assert softmax["ranges"].tolist() == [
        ("forward", f"layers.{layer}", "attention", "softmax") for layer in (0, 1)
    ]
    in_parts = {part: set(summary.within(kernels, part)["name"]) for part in ("scores", "softmax")}
    assert "aten::bmm" in in_parts["scores"] - in_parts["softmax"]


def test_self_times_of_cpu_operators_never_exceed_the_phase(cpu_trace: Trace) -> None:
    kernels = cpu_trace.kernels
    assert (set(kernels["kind"]), set(kernels["device"])) == ({"op"}, {CPU})
    assert (kernels["delay_ns"] == 0).all()
    assert gpu_time.waits(cpu_trace).empty
    for phase in PHASES:
        range_ns = cpu_trace.ranges.query("name == @phase")["duration_ns"].sum()
        frames = (cpu_trace.kernels, cpu_trace.host)
        self_ns = sum(summary.within(frame, phase)["duration_ns"].sum() for frame in frames)
        assert 0 < self_ns <= range_ns


def test_a_trace_can_be_kept_for_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "kept.json.gz"
    profile(lambda: torch.ones(3) + 1, device=torch.device("cpu"), keep_as=file)
    assert "aten::add" in set(chrome_trace.read(file, on_cpu=True).kernels["name"])


@pytest.mark.gpu
@NEEDS_GPU
def test_backward_kernels_launched_by_the_autograd_thread_are_attributed() -> None:
    trace = profiled_step(torch.device("cuda", 0))
    forward, backward, optimizer = (len(summary.within(trace.kernels, p)) for p in PHASES)
    assert backward > 1.3 * forward
    assert not trace.kernels["launch_ns"].isna().any()
    assert len(trace.host["thread"].unique()) == 2, "autograd launches from its own thread"
    assert forward + backward + optimizer == len(trace.kernels)


@pytest.mark.gpu
@NEEDS_GPU
def test_the_kernels_of_a_replayed_graph_belong_to_its_launch() -> None:
    x = torch.randn(64, 64, device="cuda")
    (x @ x).softmax(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ x).softmax(-1)

    def replay() -> None:
        with named("replay"):
            graph.replay()

    kernels = profile(replay, device=torch.device("cuda", 0)).kernels
    assert set(kernels["ranges"]) == {("replay",)}
    assert {"softmax"} < set(kernels["family"])
    assert kernels["launch_ns"].nunique() == 1


def test_an_nsys_capture_ends_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(recording, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: order.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: order.append("stop"))
    recording.capture(lambda: order.append("run"), device=torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        recording.capture(lambda: 1 / 0, device=torch.device("cuda"))
    assert order == ["start", "run", "stop", "start", "stop"]
