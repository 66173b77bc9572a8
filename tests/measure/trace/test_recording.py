"""A real train step under the PyTorch profiler: phases, self times, layers; on a GPU if any."""

from __future__ import annotations

import pytest
import torch

from lmlab.measure.trace import gpu_time, recording, summary
from lmlab.measure.trace.frames import CPU, Trace
from lmlab.measure.trace.ranges import named
from lmlab.measure.trace.recording import profile
from lmlab.model.adamw import AdamW
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import TransformerLM

PHASES = ["forward", "backward", "optimizer"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def profiled_step(device: torch.device) -> Trace:
    model = TransformerLM(50, 16, 32, 2, 2, 64, device=device)
    tokens = torch.randint(0, 50, (2, 16), device=device)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        with named("forward"):
            loss = cross_entropy(model(tokens), tokens)
        with named("backward"):
            loss.backward()
        with named("optimizer"):
            optimizer.step()

    step()
    return profile(step, device=device)


def test_self_times_of_cpu_operators_never_exceed_the_phase() -> None:
    trace = profiled_step(torch.device("cpu"))
    kernels = trace.kernels
    assert (set(kernels["kind"]), set(kernels["device"])) == ({"op"}, {CPU})
    assert (kernels["delay_ns"] == 0).all()
    assert gpu_time.waits(trace).empty
    for phase in PHASES:
        range_ns = trace.ranges.query("name == @phase")["duration_ns"].sum()
        frames = (trace.kernels, trace.host)
        self_ns = sum(summary.within(frame, phase)["duration_ns"].sum() for frame in frames)
        assert 0 < self_ns <= range_ns


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
