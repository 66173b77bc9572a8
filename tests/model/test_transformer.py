"""The model agrees with a reference, loads existing checkpoints, and is found by its path."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.attention import naive
from lmlab.model import loading
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import TransformerLM

TINY: dict[str, Any] = {
    "vocab_size": 31, "context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 3,
    "d_ff": 40,
}  # fmt: skip


def tiny(**changes: Any) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(**{**TINY, **changes})


def random_tokens(length: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY["vocab_size"], (2, length), generator=generator)


def reference_logits(weights: Mapping[str, Tensor], tokens: Tensor, theta: float) -> Tensor:
    """The same model with torch's functions, and RoPE as a complex product."""
    heads, width = TINY["num_heads"], TINY["d_model"]

    def split(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], heads, width // heads).transpose(1, 2)

    def rope(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-2], dtype=x.dtype)
        rates = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
        angles = positions[:, None] * rates
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (width,), weights[f"{name}.weight"], eps=1e-5)

    x = weights["token_embeddings.weight"][tokens]
    for layer in (f"layers.{index}" for index in range(TINY["num_layers"])):
        h = norm(x, f"{layer}.ln1")
        q, k, v = (split(h @ weights[f"{layer}.attn.{n}_proj.weight"].T) for n in "qkv")
        mixed = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ weights[f"{layer}.attn.output_proj.weight"].T
        h = norm(x, f"{layer}.ln2")
        w1, w2, w3 = (weights[f"{layer}.ffn.w{n}.weight"].T for n in (1, 2, 3))
        x = x + (F.silu(h @ w1) * (h @ w3)) @ w2
    return norm(x, "ln_final") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("theta", [10000.0, 100.0])
def test_logits_and_gradients_agree_with_a_reference_in_double_precision(theta: float) -> None:
    model = tiny(rope_theta=theta, dtype=torch.float64)
    # Norm weights of one would hide a missing multiplication.
    for name, parameter in model.named_parameters():
        if "ln" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = random_tokens()
    logits = model(tokens)
    weights = dict(model.named_parameters())
    expected = reference_logits(weights, tokens, theta)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    ours, right = (torch.autograd.grad(x.sin().sum(), weights.values()) for x in (logits, expected))
    torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


def test_the_attention_function_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Mock(side_effect=lambda q, k, v, *, is_causal: v)
    monkeypatch.setattr(naive, "recorded", recorded, raising=False)
    tiny(attention="lmlab.attention.naive:recorded")(random_tokens())
    assert [call.kwargs for call in recorded.mock_calls] == [{"is_causal": True}] * 2


def test_under_autocast_matmuls_are_bf16_and_the_residual_stream_is_fp32() -> None:
    model = tiny()
    seen: dict[str, torch.dtype] = {}

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        seen[name] = output[0].dtype if isinstance(output, tuple) else output.dtype

    for name, module in model.named_modules():
        module.register_forward_hook(partial(record, name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(random_tokens()), random_tokens())
    loss.backward()
    in_block = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.rope", "attn.output_proj"]
    in_block += ["ffn.w1", "ffn.w2", "ffn.w3"]
    bf16 = ["lm_head", *(f"layers.0.{name}" for name in in_block)]
    assert {seen[name] for name in bf16} == {torch.bfloat16}
    fp32 = ["token_embeddings", "layers.0", "layers.1", "layers.0.ln1"]
    assert {seen[name] for name in fp32} == {torch.float32}
    assert {t.dtype for t in (loss, *(p.grad for p in model.parameters()))} == {torch.float32}


def test_a_model_built_on_meta_can_be_materialized() -> None:
    model = tiny(device="meta")
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.isfinite(model(random_tokens())).all()
    for built, expected in zip(model.buffers(), tiny().buffers(), strict=True):
        assert torch.equal(built, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_heads", 5), ("num_heads", 8), ("d_model", 0), ("num_layers", -1)),
        *(("vocab_size", 3.5), ("d_ff", True), ("context_length", "16")),
        *(("rope_theta", 0.0), ("rope_theta", float("nan")), ("attention", "flush")),
    ],
)
def test_invalid_hyperparameters_are_rejected_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}[^\n]*{value!r}[^\n]*$"):
        tiny(**{name: value})


def test_a_sequence_longer_than_the_context_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^tokens must have at most .* 16 positions, got 17$"):
        tiny()(random_tokens(length=17))


def test_a_model_is_found_by_its_path() -> None:
    assert loading.load_class(loading.DEFAULT) is TransformerLM
    with pytest.raises(ValueError, match=r"^'math:sqrt' is not a class[^\n]*$"):
        loading.load_class("math:sqrt")
