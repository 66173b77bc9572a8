"""A real step under PyTorch's profiler: phases, own times, layers; on a GPU where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmlab.measure.trace import chrome_trace, gpu_time, summary
from lmlab.measure.trace.annotate import annotated
from lmlab.measure.trace.frames import CPU, Trace
from lmlab.measure.trace.ranges import named
from lmlab.measure.trace.torch_profiler import profile, profile_to
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
    with annotated(model):
        return profile(step, device=device)


@pytest.fixture(scope="module")
def cpu_trace() -> Trace:
    return profiled_step(torch.device("cpu"))


def test_every_operator_that_works_stands_in_its_phase(cpu_trace: Trace) -> None:
    kernels = cpu_trace.kernels
    assert set(kernels["ranges"].map(lambda path: path[0])) == set(PHASES)
    assert set(kernels["kind"]) == {"op"}
    assert set(kernels["device"]) == {CPU}
    assert (kernels["delay_ns"] == 0).all()


def test_products_softmax_and_optimizer_are_where_they_belong(cpu_trace: Trace) -> None:
    kernels = cpu_trace.kernels
    phases = [path[0] for path in kernels["ranges"]]
    counts = Counter(zip(phases, kernels["family"], strict=True))
    # Two layers of 7 products and 2 in attention, and the head; each twice in the backward pass.
    assert counts["forward", "matmul"] == 2 * 9 + 1
    assert counts["backward", "matmul"] == 2 * counts["forward", "matmul"]
    assert counts["forward", "softmax"] == counts["backward", "softmax"] == 2
    assert {family for phase, family in counts if phase == "optimizer"} == {"optimizer"}
    assert {phase for phase, family in counts if family == "optimizer"} == {"optimizer"}


def test_times_add_up_without_counting_any_twice(cpu_trace: Trace) -> None:
    for phase in PHASES:
        range_ns = cpu_trace.ranges.query("name == @phase")["duration_ns"].sum()
        own_ns = [
            summary.within(frame, phase)["duration_ns"].sum()
            for frame in (cpu_trace.kernels, cpu_trace.host)
        ]
        assert 0 < sum(own_ns) <= range_ns


def test_layers_and_attention_are_marked_in_the_forward_pass(cpu_trace: Trace) -> None:
    softmax = cpu_trace.kernels.query("name == 'aten::_softmax'")
    assert softmax["ranges"].tolist() == [
        ("forward", "layers.0", "attention"),
        ("forward", "layers.1", "attention"),
    ]


def test_a_cpu_has_no_calls_to_wait_for(cpu_trace: Trace) -> None:
    assert set(cpu_trace.host["kind"]) == {"op"}
    assert gpu_time.waits(cpu_trace).empty


def test_the_tool_is_named_with_its_version(cpu_trace: Trace) -> None:
    assert cpu_trace.tool == f"torch profiler {torch.__version__}"


def test_a_trace_can_be_kept_for_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "kept.json.gz"
    profile_to(file, lambda: torch.ones(3) + 1, device=torch.device("cpu"))
    assert "aten::add" in set(chrome_trace.read(file, on_cpu=True).kernels["name"])


@pytest.mark.gpu
@NEEDS_GPU
def test_a_gpus_backward_kernels_are_found_from_another_thread() -> None:
    trace = profiled_step(torch.device("cuda", 0))
    forward, backward, optimizer = summary.range_totals(trace.kernels, PHASES)["kernels"].tolist()
    assert backward > 1.3 * forward
    assert not trace.kernels["launch_ns"].isna().any()
    assert len(trace.host["thread"].unique()) == 2, "autograd launches from its own"
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
