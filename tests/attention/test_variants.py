"""Every variant is the same function, on a CPU as far as it runs there."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from lmlab.attention import compiled, registry
from lmlab.attention.flex import causal_block_mask
from lmlab.attention.sdpa import flash as sdpa_flash
from lmlab.model.transformer import TransformerLM
from tests.attention.reference import Shape, assert_right

DIFFERENTIABLE_ON_A_CPU = ["naive", "sdpa_flash", "sdpa_math", "tiled", "flash"]
ON_A_CPU = [*DIFFERENTIABLE_ON_A_CPU, "flex"]
BOTTOM_RIGHT = ["naive", "flex", "tiled", "flash"]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", DIFFERENTIABLE_ON_A_CPU)
def test_outputs_and_gradients_are_those_of_float64(name: str, is_causal: bool) -> None:
    inputs = Shape(keys=33, head_dim=16, heads=2, batch=2).inputs()

    assert_right(partial(registry.load(name), is_causal=is_causal), inputs, is_causal)


@pytest.fixture
def _compiler_that_makes_no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tracing as ever, and eager operations in the end: making C++ takes most of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    compiled._compiled.cache_clear()
    yield
    torch.compiler.reset()
    compiled._compiled.cache_clear()


@pytest.mark.usefixtures("_compiler_that_makes_no_code")
def test_the_compiled_formula_is_the_same_function() -> None:
    inputs = Shape(keys=33, head_dim=16).inputs()

    assert_right(partial(registry.load("compiled"), is_causal=True), inputs, True)


@pytest.mark.usefixtures("_compiler_that_makes_no_code")
def test_more_shapes_than_the_compiler_keeps_are_an_error_and_never_run_eagerly() -> None:
    attention = registry.load("compiled")

    def run_lengths(lengths: range) -> None:
        for length in lengths:
            q, k, v, _ = Shape(keys=length, head_dim=4).inputs()
            attention(q, k, v, is_causal=True)

    run_lengths(range(4, 10))
    with pytest.raises(FailOnRecompileLimitHit):
        run_lengths(range(10, 20))


@pytest.mark.parametrize("name", ON_A_CPU)
@pytest.mark.parametrize(
    "leading", [(), (2,), (2, 1, 2)], ids=["no batch", "batch", "three dimensions"]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_leading_dimensions_are_kept(name: str, leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*leading, 17, 16, generator=generator) for _ in range(3))

    output = registry.load(name)(q, k, v, is_causal=True)

    expected = registry.load("naive")(q, k, v, is_causal=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BOTTOM_RIGHT)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fewer_causal_queries_than_keys_are_the_last_ones(name: str) -> None:
    q, k, v, _ = Shape(keys=33, head_dim=16).inputs()
    attention = registry.load(name)

    last = attention(q[:, :, -5:], k, v, is_causal=True)

    everything = attention(q, k, v, is_causal=True)
    torch.testing.assert_close(last, everything[:, :, -5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BOTTOM_RIGHT)
def test_more_causal_queries_than_keys_are_refused(name: str) -> None:
    q, k, v, _ = Shape(keys=3, queries=4, head_dim=16).inputs()

    with pytest.raises(ValueError, match=r"got 4 queries and 3 keys$"):
        registry.load(name)(q, k, v, is_causal=True)


def test_pytorchs_other_alignment_is_refused_and_not_passed_off_as_ours() -> None:
    q, k, v, _ = Shape(keys=5, queries=3, head_dim=16).inputs()

    with pytest.raises(ValueError, match=r"top left.*got 3 queries and 5 keys$"):
        sdpa_flash(q, k, v, is_causal=True)


def test_a_backend_never_gives_way_to_another() -> None:
    q, k, v, _ = Shape(keys=5, head_dim=16).inputs()

    with pytest.raises(RuntimeError, match="No viable backend"):
        registry.load("sdpa_cudnn")(q, k, v, is_causal=True)


def logits(attention: str) -> Tensor:
    torch.manual_seed(0)
    model = TransformerLM(31, 24, 32, 2, 2, 48, attention=attention)
    tokens = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(1))
    output: Tensor = model(tokens)
    return output


@pytest.mark.parametrize("name", ["flash", "tiled", "sdpa_math", "sdpa_flash"])
def test_any_of_them_can_be_the_models_attention(name: str) -> None:
    torch.testing.assert_close(logits(name), logits("naive"), rtol=1e-4, atol=1e-5)


def test_the_model_learns_through_flash_as_through_the_formula() -> None:
    def gradient(name: str) -> Tensor:
        torch.manual_seed(0)
        model = TransformerLM(31, 24, 32, 1, 2, 48, attention=name)
        loss = model(torch.arange(24)[None]).logsumexp(-1).mean()
        return torch.autograd.grad(loss, model.layers[0].attn.q_proj.weight)[0]

    torch.testing.assert_close(gradient("flash"), gradient("naive"), rtol=1e-4, atol=1e-7)


def test_flex_remembers_its_block_mask() -> None:
    device = torch.device("cpu")

    assert causal_block_mask(40, 50, device) is causal_block_mask(40, 50, device)
    assert math.isclose(float(causal_block_mask(1024, 1024, device).sparsity()), 43.75)
