"""Flash attention as compiled for a GPU: all types, large shapes, memory, launches."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lmlab.attention import flash_attention, registry
from lmlab.attention.support import why_unsupported
from lmlab.measure.precision import tf32_allowed
from tests.attention.reference import Shape, assert_correct, attend, exact, output_and_gradients
from tests.attention.test_flash import bshd, shapes, strided_features

pytestmark = pytest.mark.gpu

CAUSAL = partial(flash_attention, is_causal=True)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP32_AND_BF16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def skip_below(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, there are {free:.0f}")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_type_and_head_dim(dtype: torch.dtype, head_dim: int, is_causal: bool) -> None:
    inputs = Shape(keys=389, head_dim=head_dim, heads=2, batch=2).inputs(dtype, "cuda")
    assert_correct(flash_attention, inputs, is_causal)


@settings(max_examples=40)
@given(shapes(longest=700), st.booleans(), st.sampled_from(list(DTYPES.values())))
def test_any_shape(shape: Shape, is_causal: bool, dtype: torch.dtype) -> None:
    assert_correct(flash_attention, shape.inputs(dtype, "cuda"), is_causal)


@FP32_AND_BF16
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *((Shape(keys=keys, head_dim=64), Tensor.contiguous) for keys in (128, 1024, 4096)),
        (Shape(keys=2048, head_dim=64, heads=8), Tensor.contiguous),
        (Shape(keys=1024, head_dim=128, heads=8, group=4), Tensor.contiguous),
        *(
            (Shape(keys=300, head_dim=64, heads=4, batch=2), view)
            for view in (bshd, strided_features)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_determinism(shape: Shape, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    q, k, v, grad_o = map(layout, shape.inputs(dtype, "cuda"))
    assert_correct(CAUSAL, (q, k, v, grad_o), True)
    first = output_and_gradients(CAUSAL, q, k, v, grad_o)
    for _ in range(5):
        assert all(map(torch.equal, first, output_and_gradients(CAUSAL, q, k, v, grad_o)))
    with torch.autograd.graph.save_on_cpu():  # backward gets other tensors than forward saved
        assert all(map(torch.equal, first, output_and_gradients(CAUSAL, q, k, v, grad_o)))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_fp32_is_exact_unless_tf32_is_requested(head_dim: int) -> None:
    inputs = Shape(keys=4096, head_dim=head_dim, heads=2).inputs(torch.float32, "cuda")
    plain = output_and_gradients(lambda q, k, v: attend(q, k, v, True)[0], *inputs)
    ours = output_and_gradients(CAUSAL, *inputs)
    with tf32_allowed(True):
        tf32 = output_and_gradients(CAUSAL, *inputs)
    numbers = zip("oqkv", ours, tf32, plain, exact(inputs, True), strict=True)
    for name, our, rounded, usual, right in numbers:
        error, allowed = (our - right).abs().max(), (usual - right).abs().max()
        assert error < (4 if name == "o" else 64) * allowed  # TF32 is a thousand times worse
        assert 1e-5 < (rounded - our).abs().max() < 5e-2


def test_more_batches_and_heads_than_a_grid_has_in_its_second_dimension() -> None:
    inputs = Shape(keys=17, head_dim=16, batch=70_000).inputs(torch.float16, "cuda")
    assert_correct(CAUSAL, inputs, True)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    skip_below(60)
    inputs = Shape(keys=128, head_dim=64, heads=2, batch=2**17 + 8).inputs(torch.bfloat16, "cuda")
    assert inputs[0].numel() > 2**31
    found = output_and_gradients(CAUSAL, *inputs)
    # Many enough to fill the GPU like all of them: the tiles, and so the bits, are the same.
    q, k, v, grad_o = (x[-2048:] for x in inputs)
    expected = output_and_gradients(CAUSAL, q, k, v, grad_o)
    assert all(torch.equal(our[-2048:], right) for our, right in zip(found, expected, strict=True))
    assert_correct(CAUSAL, (q, k, v, grad_o), True)


def test_a_row_that_begins_beyond_two_to_the_31() -> None:
    skip_below(40)
    q = torch.empty(2, 2**22, 1024, dtype=torch.float16, device="cuda")[1, -200:, :64].normal_()
    assert q.storage_offset() > 2**31
    assert torch.equal(CAUSAL(q, q, q), CAUSAL(*(q.clone() for _ in range(3))))


def peak_beyond_inputs(sequence: int) -> int:
    """Peak bytes of a forward and backward, besides the inputs."""
    q, k, v, grad_o = Shape(keys=sequence, head_dim=64).inputs(torch.bfloat16, "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    CAUSAL(*inputs).backward(grad_o)
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_linearly_with_the_sequence() -> None:
    CAUSAL(*Shape(keys=128, head_dim=64).inputs(torch.bfloat16, "cuda")[:3])
    short, long = peak_beyond_inputs(65_536), peak_beyond_inputs(131_072)
    assert short < 65_536 * 65_536 / 8  # not even one bit per score
    assert long == pytest.approx(2 * short, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "keys", "before_backward"),
    [
        pytest.param(torch.bfloat16, 4096, ["delta_kernel"], id="bf16"),
        pytest.param(torch.bfloat16, 512, [], id="bf16, short"),
        pytest.param(torch.float32, 4096, ["decompose_kernel"], id="fp32"),
    ],
)
def test_number_of_launches(dtype: torch.dtype, keys: int, before_backward: list[str]) -> None:
    q, k, v, grad_o = Shape(keys=keys, head_dim=64, heads=2).inputs(dtype, "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    CAUSAL(*inputs).backward(grad_o)  # compiled by now

    def launched(function: Callable[[], Any]) -> list[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            function()
            torch.cuda.synchronize()
        events = trace.events() or []
        return [event.name for event in events if "cuda" in str(event.device_type).lower()]

    o = CAUSAL(*inputs)
    assert launched(partial(CAUSAL, *inputs)) == ["flash_forward_kernel"]
    backward = partial(torch.autograd.grad, o, inputs, grad_o)
    assert launched(backward) == [*before_backward, "flash_backward_kernel"]


def test_streams_and_captured_graphs_do_not_share_semaphores() -> None:
    inputs = Shape(keys=4096, head_dim=64).inputs(torch.bfloat16, "cuda")
    expected = output_and_gradients(CAUSAL, *inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in 20 * streams:
        with torch.cuda.stream(stream):
            results.append(output_and_gradients(CAUSAL, *inputs))
    torch.cuda.synchronize()
    assert all(all(map(torch.equal, result, expected)) for result in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = CAUSAL(*inputs[:3])
    for _ in range(3):
        o.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, expected[0])


def test_compiled_into_one_graph() -> None:
    torch.compiler.reset()
    inputs = Shape(keys=256, head_dim=64, heads=2).inputs(torch.bfloat16, "cuda")

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CAUSAL(q * 1.5, k, v) + 1.0

    found = output_and_gradients(torch.compile(eager, fullgraph=True), *inputs)
    expected = output_and_gradients(eager, *inputs)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@FP32_AND_BF16
@pytest.mark.parametrize("name", sorted(registry.VARIANTS))
def test_every_variant_is_correct_or_reports_why_not(name: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    reason = why_unsupported(name, device=torch.device("cuda"), dtype=dtype, head_dim=64)
    if reason:
        pytest.skip(reason)
    inputs = Shape(keys=256, head_dim=64, heads=2, batch=2).inputs(dtype, "cuda")
    assert_correct(registry.load(name), inputs, True)


def test_a_known_call_runs_in_a_new_thread() -> None:
    """Its first CUDA work may be ours, before PyTorch has given the thread a context."""
    inputs = Shape(keys=256, head_dim=64).inputs(torch.bfloat16, "cuda")[:3]
    expected = [CAUSAL(*inputs) for _ in range(2)][-1]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(CAUSAL, *inputs).result(), expected)
