"""Every variant is the same function, on a CPU as far as it runs there."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit

from lmlab.attention import FlashAttentionTiled, compiled, registry, tiled
from lmlab.attention.flex import causal_block_mask
from tests.attention.reference import Shape, assert_correct, exact, output_and_gradients

DIFFERENTIABLE = ["naive", "unfused", "sdpa_flash", "sdpa_math", "tiled", "flash"]
BOTTOM_RIGHT = ["naive", "flex", "tiled", "flash"]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def _no_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tracing as usual, then eager operations: generating C++ takes most of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def forget() -> None:
        torch.compiler.reset()
        compiled.whole_graph.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("_no_code_generation")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "flash_compiled_backward"])
def test_outputs_and_gradients_match_float64(name: str, is_causal: bool) -> None:
    inputs = Shape(keys=33, head_dim=16, heads=2, batch=2).inputs()
    assert_correct(registry.load(name), inputs, is_causal)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_code_generation")
def test_compiled_is_correct_and_never_falls_back_to_eager() -> None:
    attention = registry.load("compiled")
    assert_correct(attention, Shape(keys=33, head_dim=16).inputs(), True)
    # More shapes than the compiler keeps are an error.
    with pytest.raises(FailOnRecompileLimitHit):  # noqa: PT012
        for length in range(4, 20):
            q, k, v, _ = Shape(keys=length, head_dim=4).inputs()
            attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "flex"])
@pytest.mark.parametrize("leading", [(), (2,), (2, 1, 2)], ids=str)
def test_leading_dimensions_are_kept(name: str, leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*leading, 17, 16, generator=generator) for _ in range(3))
    output = registry.load(name)(q, k, v, is_causal=True)
    expected = registry.load("naive")(q, k, v, is_causal=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BOTTOM_RIGHT)
def test_the_causal_mask_is_aligned_at_the_bottom_right(name: str) -> None:
    q, k, v, _ = Shape(keys=33, head_dim=16).inputs()
    attention = registry.load(name)
    last = attention(q[:, :, -5:], k, v, is_causal=True)
    expected = attention(q, k, v, is_causal=True)[:, :, -5:]
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"got 33 queries and 3 keys$"):
        attention(q, k[:, :, :3], v[:, :, :3], is_causal=True)


def test_sdpa_raises_where_its_mask_or_backend_differs() -> None:
    q, k, v, _ = Shape(keys=5, queries=3, head_dim=16).inputs()
    with pytest.raises(ValueError, match=r"top left.*got 3 queries and 5 keys$"):
        registry.load("sdpa_flash")(q, k, v, is_causal=True)
    with pytest.raises(RuntimeError, match="No viable backend"):
        registry.load("sdpa_cudnn")(q, k, v, is_causal=False)


def test_the_block_mask_of_flex_is_cached_and_sparse() -> None:
    device = torch.device("cpu")
    assert causal_block_mask(40, 50, device) is causal_block_mask(40, 50, device)
    assert float(causal_block_mask(1024, 1024, device).sparsity()) == pytest.approx(43.75)


@settings(max_examples=20)
@given(st.data(), st.integers(1, 300), st.sampled_from([1, 3, 16, 40]), st.booleans())
def test_tiled_is_exact(data: st.DataObject, keys: int, head_dim: int, is_causal: bool) -> None:
    queries = data.draw(st.integers(1, keys))
    inputs = Shape(keys=keys, queries=queries, head_dim=head_dim, heads=2).inputs(torch.float64)
    found = output_and_gradients(partial(tiled.attention, is_causal=is_causal), *inputs)
    torch.testing.assert_close(found, exact(inputs, is_causal), rtol=1e-10, atol=1e-10)


def test_unsupported_inputs_of_tiled_are_one_line_errors() -> None:
    q, k, v, _ = Shape(keys=8, head_dim=4, heads=4, group=2).inputs()
    with pytest.raises(ValueError, match=r"same number of heads$"):
        tiled.attention(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"allowed: \(batch, queries, d\)$"):
        FlashAttentionTiled.apply(q, q, q)
    with pytest.raises(ValueError, match=r"dtype is torch\.int32; allowed"):
        tiled.attention(q.int(), q.int(), q.int(), is_causal=True)
