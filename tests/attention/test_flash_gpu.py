"""Flash attention as compiled for a GPU: all types, large shapes, memory, launches."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lmlab.attention import FlashAttention, flash_attention, registry
from lmlab.attention.support import why_unsupported
from tests.attention.reference import Shape, assert_right, attend, output_and_gradients
from tests.attention.test_flash import features_apart, heads_last

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CAUSAL = partial(flash_attention, is_causal=True)
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_every_type_and_head_dim(dtype: torch.dtype, head_dim: int, is_causal: bool) -> None:
    inputs = Shape(keys=389, head_dim=head_dim, heads=2, batch=2).inputs(dtype, "cuda")

    assert_right(partial(flash_attention, is_causal=is_causal), inputs, is_causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [128, 1024, 4096, 8192], ids=str)
def test_a_single_head_whose_keys_are_shared_out(sequence: int, dtype: torch.dtype) -> None:
    inputs = Shape(keys=sequence, head_dim=64).inputs(dtype, "cuda")

    assert_right(CAUSAL, inputs, True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([1, 1, 2, 4]))
    keys = data.draw(st.integers(1, 700))
    shape = Shape(
        keys=keys,
        queries=data.draw(st.integers(1, keys)),
        head_dim=data.draw(st.sampled_from([16, 24, 64, 80, 128])),
        batch=data.draw(st.integers(1, 3)),
        heads=group * data.draw(st.integers(1, 3)),
        group=group,
    )
    is_causal = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(list(TYPES.values())))

    assert_right(
        partial(flash_attention, is_causal=is_causal), shape.inputs(dtype, "cuda"), is_causal
    )


@pytest.mark.parametrize("strided", [heads_last, features_apart])
def test_strided_inputs_and_gradient(strided: "type[Tensor]") -> None:
    inputs = Shape(keys=300, head_dim=64, heads=4, batch=2).inputs(torch.bfloat16, "cuda")

    assert_right(CAUSAL, tuple(strided(x) for x in inputs), True)  # type: ignore[arg-type]


def test_fp32_is_as_exact_as_fp32_can_be() -> None:
    q, k, v, _ = Shape(keys=1024, head_dim=128, heads=2).inputs(torch.float32, "cuda")
    right, _ = attend(q.double(), k.double(), v.double(), is_causal=True)

    error = (flash_attention(q, k, v, is_causal=True) - right).abs().max()

    plain = (attend(q, k, v, is_causal=True)[0] - right).abs().max()
    assert error < 4 * plain  # TF32 would be a thousand times worse


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_fp32_gradients_are_as_exact_as_fp32_can_be(head_dim: int) -> None:
    inputs = Shape(keys=4096, head_dim=head_dim, heads=2).inputs(torch.float32, "cuda")
    by_formula = partial(output_and_gradients, lambda q, k, v: attend(q, k, v, True)[0])
    right = by_formula(*(x.double() for x in inputs))

    ours, plain = output_and_gradients(CAUSAL, *inputs), by_formula(*inputs)

    for our, usual, exact in zip(ours, plain, right, strict=True):
        error, allowed = (our - exact).abs().max(), (usual - exact).abs().max()
        assert error < 64 * allowed  # TF32 would be a thousand times worse


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tf32_is_used_when_asked_for(head_dim: int) -> None:
    inputs = Shape(keys=1024, head_dim=head_dim, heads=4).inputs(torch.float32, "cuda")
    exact = output_and_gradients(CAUSAL, *inputs)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rounded = output_and_gradients(CAUSAL, *inputs)
    finally:
        torch.set_float32_matmul_precision(before)

    for ours, right in zip(rounded, exact, strict=True):
        assert 1e-5 < (ours - right).abs().max() < 5e-2


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(keys=2048, head_dim=64, heads=8), id="many programs"),
        pytest.param(Shape(keys=4096, head_dim=64), id="keys shared out"),
        pytest.param(Shape(keys=1024, head_dim=128, heads=8, group=4), id="grouped heads"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_inputs_give_the_same_bits(shape: Shape, dtype: torch.dtype) -> None:
    inputs = shape.inputs(dtype, "cuda")

    first = output_and_gradients(CAUSAL, *inputs)

    for _ in range(5):
        assert all(map(torch.equal, first, output_and_gradients(CAUSAL, *inputs)))


def test_more_batches_and_heads_than_a_grid_has_in_its_second_dimension() -> None:
    shape = Shape(keys=17, head_dim=16, batch=70_000)
    inputs = shape.inputs(torch.float16, "cuda")

    assert_right(CAUSAL, inputs, True)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    if free_gib() < 60:
        pytest.skip(f"needs 60 GiB of free GPU memory, there are {free_gib():.0f}")
    shape = Shape(keys=128, head_dim=64, heads=2, batch=2**17 + 8)
    q, k, v, grad_o = shape.inputs(torch.bfloat16, "cuda")
    assert q.numel() > 2**31

    ours = output_and_gradients(CAUSAL, q, k, v, grad_o)

    last = tuple(x[-2:] for x in (q, k, v, grad_o))
    expected = output_and_gradients(CAUSAL, *last)
    assert all(torch.equal(our[-2:], right) for our, right in zip(ours, expected, strict=True))
    assert_right(CAUSAL, last, True)  # type: ignore[arg-type]


def test_a_row_that_begins_beyond_two_to_the_31() -> None:
    if free_gib() < 40:
        pytest.skip(f"needs 40 GiB of free GPU memory, there are {free_gib():.0f}")
    apart = torch.empty(2, 2**22, 1024, dtype=torch.float16, device="cuda")
    q = apart[1, -200:, :64].normal_()
    assert q.storage_offset() > 2**31

    o = flash_attention(q, q, q, is_causal=True)

    assert torch.equal(o, CAUSAL(*(q.clone() for _ in range(3))))


def peak_beyond_inputs(sequence: int) -> int:
    """Bytes that a forward and a backward take at most, besides what they were given."""
    q, k, v, grad_o = Shape(keys=sequence, head_dim=64).inputs(torch.bfloat16, "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    CAUSAL(*inputs).backward(grad_o)
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    CAUSAL(*Shape(keys=128, head_dim=64).inputs(torch.bfloat16, "cuda")[:3])
    short, long = peak_beyond_inputs(65_536), peak_beyond_inputs(131_072)

    assert short < 65_536 * 65_536 / 8  # not even one bit for each pair
    assert long == pytest.approx(2 * short, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "keys", "prepared"),
    [
        pytest.param(torch.bfloat16, 4096, ["delta_kernel"], id="bf16"),
        pytest.param(torch.bfloat16, 512, [], id="bf16, short"),
        pytest.param(torch.float32, 4096, ["split_kernel"], id="fp32"),
    ],
)
def test_one_launch_forward_and_few_backward(
    dtype: torch.dtype, keys: int, prepared: list[str]
) -> None:
    q, k, v, grad_o = Shape(keys=keys, head_dim=64, heads=2).inputs(dtype, "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    CAUSAL(*inputs).backward(grad_o)  # compiled by now

    def launched(function: "partial[object]") -> list[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            function()
            torch.cuda.synchronize()
        return [
            event.name for event in trace.events() or [] if "cuda" in str(event.device_type).lower()
        ]

    o = CAUSAL(*inputs)
    assert launched(partial(CAUSAL, *inputs)) == ["flash_forward_kernel"]
    backward = partial(torch.autograd.grad, o, inputs, grad_o)
    assert launched(backward) == [*prepared, "flash_backward_kernel"]


def test_two_streams_at_once() -> None:
    inputs = Shape(keys=4096, head_dim=64).inputs(torch.bfloat16, "cuda")
    expected = output_and_gradients(CAUSAL, *inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]

    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(output_and_gradients(CAUSAL, *inputs))
    torch.cuda.synchronize()

    assert all(all(map(torch.equal, result, expected)) for result in results)


def test_a_captured_graph_replays() -> None:
    q, k, v, _ = Shape(keys=4096, head_dim=64).inputs(torch.bfloat16, "cuda")
    expected = CAUSAL(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = CAUSAL(q, k, v)

    for _ in range(3):
        o.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, expected)


def test_compiled_into_one_graph() -> None:
    torch.compiler.reset()
    inputs = Shape(keys=256, head_dim=64, heads=2).inputs(torch.bfloat16, "cuda")
    function = torch.compile(lambda q, k, v: CAUSAL(q * 1.5, k, v) + 1.0, fullgraph=True)

    ours = output_and_gradients(function, *inputs)

    expected = output_and_gradients(lambda q, k, v: CAUSAL(q * 1.5, k, v) + 1.0, *inputs)
    for our, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(our, right, rtol=2e-2, atol=2e-2)


def test_autocast() -> None:
    q, k, v, grad_o = Shape(keys=256, head_dim=64, heads=2).inputs(torch.float32, "cuda")

    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, *grads = output_and_gradients(CAUSAL, q, k, v, grad_o.bfloat16())

    assert o.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}


def test_the_interpreter_and_the_compiler_agree() -> None:
    inputs = Shape(keys=70, head_dim=32, heads=2).inputs(torch.float16)

    on_cpu = output_and_gradients(CAUSAL, *inputs)

    on_gpu = output_and_gradients(CAUSAL, *(x.cuda() for x in inputs))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=5e-3, atol=5e-3)


def test_the_class_saves_one_log_sum_exp() -> None:
    q, k, v, _ = (
        x[:, 0].requires_grad_()
        for x in Shape(keys=300, head_dim=64, batch=3).inputs(torch.bfloat16, "cuda")
    )

    o = FlashAttention.apply(q, k, v, is_causal=True)

    saved = [x for x in o.grad_fn.saved_tensors if x.shape == (3, 300)]
    assert len(saved) == 1
    expected = attend(q.double(), k.double(), v.double(), is_causal=True)[1]
    torch.testing.assert_close(saved[0].double(), expected, rtol=0, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry.VARIANTS))
def test_every_variant_is_right_or_says_why_not(name: str) -> None:
    torch.compiler.reset()
    for dtype in (torch.bfloat16, torch.float32):
        if why_unsupported(name, device=torch.device("cuda"), dtype=dtype, head_dim=64):
            continue
        inputs = Shape(keys=256, head_dim=64, heads=2, batch=2).inputs(dtype, "cuda")
        assert_right(partial(registry.load(name), is_causal=True), inputs, True)


def test_cpu_and_gpu_tensors_together_are_one_clear_line() -> None:
    q = torch.randn(1, 1, 8, 16)

    with pytest.raises(ValueError, match="one type and device"):
        CAUSAL(q, q.cuda(), q.cuda())
