"""Ranges are no-ops unless recorded, are added from outside, and name the work of a real step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity
from torch.profiler import profile as session

from lmlab.attention import naive
from lmlab.measure.trace import ranges
from lmlab.measure.trace import recording as recording_module
from lmlab.measure.trace.digest import within
from lmlab.measure.trace.ranges import annotated, in_range, named, recording, with_part_ranges
from lmlab.measure.trace.recording import profile
from lmlab.model.adamw import AdamW
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import TransformerLM


def recorded_ranges(function: Callable[[], object]) -> list[str]:
    """Names of the ranges that the PyTorch profiler sees while the function runs."""
    with session(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    return [event.name for event in profiler.events() if event.is_user_annotation]


def test_ranges_are_recorded_only_inside_recording() -> None:
    def run() -> None:
        for outer in (recording(), named("not recorded")):
            with outer, named("mine"):
                torch.ones(2)

    assert recorded_ranges(run) == ["mine"]
    with pytest.raises(ZeroDivisionError), recording():
        _ = 1 / 0
    assert named("a") is named("b"), "one shared no-op"


def test_a_function_in_a_range_keeps_its_name_and_result() -> None:
    def double(x: int) -> int:
        return 2 * x

    with_range = in_range("doubling", double)
    assert (with_range.__name__, with_range(x=3)) == ("double", 6)
    with recording():
        assert recorded_ranges(lambda: with_range(1)) == ["doubling"]


def test_nvtx_ranges_are_of_the_process_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Mock(range_start=Mock(side_effect=[1, 2]))  # a machine without a GPU has no NVTX
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with recording(), named("forward"), named("layers.0"):
        pass
    expected = [call.range_start("forward"), call.range_start("layers.0")]
    assert nvtx.mock_calls == [*expected, call.range_end(2), call.range_end(1)]


TOKENS = torch.arange(8).reshape(1, 8)
Q, K, V = (torch.randn(1, 2, 4, 6) for _ in range(3))
PARTS = ["scores", "/scores", "softmax", "/softmax", "output", "/output"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that are opened and closed, in order."""
    log: list[str] = []

    @contextmanager
    def logged(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"/{name}")

    monkeypatch.setattr(ranges, "named", logged)
    return log


@pytest.fixture
def model() -> TransformerLM:
    return TransformerLM(16, 8, 8, 2, 2, 16)


@pytest.mark.parametrize("parts", [[], PARTS], ids=["whole", "in-parts"])
def test_layers_have_ranges(model: TransformerLM, opened: list[str], parts: list[str]) -> None:
    plain = model(TOKENS)
    with annotated(model, attention_in_parts=bool(parts)), recording():
        assert torch.equal(model(TOKENS), plain)
    attention = ["attention", *parts, "/attention"]
    expected = ["layers.0", *attention, "/layers.0", "layers.1", *attention, "/layers.1"]
    assert opened == expected
    model(TOKENS)
    assert opened == expected, "afterwards the model is unchanged"
    modules = list(model.modules())
    assert not any("forward" in vars(module) for module in modules)
    assert {vars(m)["attention"] for m in modules if "attention" in vars(m)} == {naive.attention}


def test_what_raises_closes_its_range(model: TransformerLM, opened: list[str]) -> None:
    model.layers[1].register_forward_hook(lambda *inputs: 1 / 0)
    with annotated(model), pytest.raises(ZeroDivisionError):
        model(TOKENS)
    assert opened[-1] == "/layers.1"
    opened.clear()
    with recording(), pytest.raises(ZeroDivisionError):
        with_part_ranges(lambda q, k, v: (q @ k.mT) / (1 / 0))(Q, K, V)
    assert opened == PARTS[:4]


def test_any_model_with_a_module_list_can_be_annotated(opened: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2))
    with annotated(model):
        model(torch.ones(1, 4, 8))
    assert opened[::2] == ["1.layers.0", "1.layers.1"]


def with_operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def with_bmm_and_a_third_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q[0], k[0].mT).softmax(-1), v[0]) @ torch.eye(6)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        *((f, PARTS) for f in (with_operators, with_einsum, with_bmm_and_a_third_product)),
        (functional.scaled_dot_product_attention, []),
    ],
)
def test_parts(attention: Callable[..., Tensor], expected: list[str], opened: list[str]) -> None:
    plain = with_part_ranges(attention)(Q, K, V)
    assert opened == [], "nothing happens outside a recording"
    with recording():
        assert torch.equal(with_part_ranges(attention)(Q, K, V), plain)
    assert opened == expected


def test_compiled_code_is_left_alone(model: TransformerLM, opened: list[str]) -> None:
    with annotated(torch.compile(model)):  # compiled when it is called
        assert not any("forward" in vars(module) for module in model.modules())
    compilations: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    attention = torch.compile(with_part_ranges(with_operators), backend=backend)
    plain = attention(Q, K, V)
    with recording():
        assert torch.equal(attention(Q, K, V), plain)
    assert (opened, len(compilations)) == ([], 1)


@pytest.mark.gpu
def test_backward_kernels_launched_by_the_autograd_thread_are_attributed() -> None:
    device = torch.device("cuda", 0)
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
    kernels = profile(step, device=device).kernels
    phases = {p: len(within(kernels, p)) for p in ("forward", "backward", "optimizer")}
    assert phases["backward"] > 1.3 * phases["forward"]
    assert not kernels["launch_ns"].isna().any()
    assert sum(phases.values()) == len(kernels)


@pytest.mark.gpu
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
    profiler = Mock()
    monkeypatch.setattr(recording_module, "synchronize", lambda device: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, getattr(profiler, name))
    recording_module.capture(profiler.run, device=torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        recording_module.capture(lambda: 1 / 0, device=torch.device("cuda"))
    calls = [call.start(), call.run(), call.stop(), call.start(), call.stop()]
    assert profiler.mock_calls == calls
