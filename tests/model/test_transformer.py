"""The model is the Transformer that it says it is, and carries the names of its checkpoints."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.model.adamw import AdamW
from lmlab.model.loss import cross_entropy
from lmlab.model.transformer import TransformerLM

TINY: dict[str, Any] = {
    "vocab_size": 31,
    "context_length": 16,
    "d_model": 24,
    "num_layers": 2,
    "num_heads": 3,
    "d_ff": 40,
}


def tiny(**changes: Any) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(**{**TINY, **changes})


def random_tokens(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(
        TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1)
    )


def reference_logits(weights: dict[str, Tensor], tokens: Tensor, theta: float) -> Tensor:
    """The same model from torch's own functions, RoPE as a complex product."""
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
def test_forward_agrees_with_an_independent_reference_in_double_precision(theta: float) -> None:
    model = tiny(rope_theta=theta, dtype=torch.float64)
    # Norm weights of one would hide a missing multiplication.
    for name, parameter in model.named_parameters():
        if "ln" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = random_tokens()

    logits = model(tokens)

    expected = reference_logits(model.state_dict(), tokens, theta)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_checkpoint_holds_exactly_the_names_of_the_course_model() -> None:
    names = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for layer in range(TINY["num_layers"]):
        names |= {f"layers.{layer}.attn.{p}_proj.weight" for p in ("q", "k", "v", "output")}
        names |= {f"layers.{layer}.ffn.{w}.weight" for w in ("w1", "w2", "w3")}
        names |= {f"layers.{layer}.{norm}.weight" for norm in ("ln1", "ln2")}

    model = tiny()

    assert set(model.state_dict()) == names
    assert {name for name, _ in model.named_parameters()} == names


def test_a_checkpoint_gives_another_model_the_same_logits() -> None:
    first, tokens = tiny(), random_tokens()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = TransformerLM(**TINY)
    assert not torch.equal(second(tokens), first(tokens))

    second.load_state_dict(torch.load(file, weights_only=True), strict=True)

    assert torch.equal(second(tokens), first(tokens))


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_a_token_changes_its_own_logits_and_later_ones_only(changed: int) -> None:
    model, tokens = tiny(), random_tokens(batch=1)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % TINY["vocab_size"]

    before, after = model(tokens)[0], model(other)[0]

    assert torch.equal(before[:changed], after[:changed])
    assert all(
        not torch.equal(b, a) for b, a in zip(before[changed:], after[changed:], strict=True)
    )


def test_the_attention_function_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import lmlab.attention.naive as naive

    calls: list[bool] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        calls.append(is_causal)
        return v

    monkeypatch.setattr(naive, "recorded", recorded, raising=False)
    tiny(attention="lmlab.attention.naive:recorded")(random_tokens())

    assert calls == [True] * TINY["num_layers"]


def test_learns_a_small_batch_by_heart() -> None:
    model = tiny()
    tokens = random_tokens(batch=2, length=12)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()

    assert loss.item() < 0.05


def test_every_parameter_gets_a_gradient() -> None:
    model, tokens = tiny(), random_tokens()

    cross_entropy(model(tokens), tokens).backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_under_autocast_products_run_in_bf16_and_the_residual_stream_in_fp32() -> None:
    model = tiny()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update(
                {name: output[0].dtype if isinstance(output, tuple) else output.dtype}
            )
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(random_tokens()), random_tokens())
    loss.backward()

    linear = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj"]
    linear += ["ffn.w1", "ffn.w2", "ffn.w3", "attn.rope"]
    # The rotation's module is shared, so it is listed once, under the first layer.
    assert {seen[f"layers.0.{name}"] for name in linear} == {torch.bfloat16}
    assert seen["lm_head"] == torch.bfloat16
    assert {seen[n] for n in ("token_embeddings", "layers.0", "layers.1", "layers.0.ln1")} == {
        torch.float32
    }
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_model_built_on_meta_becomes_real_where_it_is_wanted() -> None:
    model = tiny(device="meta")
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}

    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()

    assert torch.isfinite(model(random_tokens())).all()
    rope, expected = model.layers[0].attn.rope, tiny().layers[0].attn.rope
    assert torch.equal(rope.cos, expected.cos)
    assert torch.equal(rope.sin, expected.sin)


def test_the_same_seed_gives_the_same_model() -> None:
    for first, second in zip(tiny().parameters(), tiny().parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_sequence_longer_than_the_context_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="17 tokens are longer than context_length, which is 16"):
        tiny()(random_tokens(length=17))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads: 5 does not divide d_model, which is 24"),
        ({"num_heads": 8}, "num_heads: 8 gives a head dimension of 3 .* even"),
        ({"d_model": 0}, "d_model: 0 is not allowed; an integer of at least 1 is"),
        ({"num_layers": -1}, "num_layers: -1 is not allowed"),
        ({"vocab_size": 3.5}, "vocab_size: 3.5 is not allowed"),
        ({"d_ff": True}, "d_ff: True is not allowed"),
        ({"context_length": "16"}, "context_length: '16' is not allowed"),
        ({"rope_theta": 0.0}, "rope_theta: 0.0 is not allowed; a number above 0 is"),
        ({"rope_theta": float("nan")}, "rope_theta: nan is not allowed"),
        ({"attention": "flush"}, "attention: 'flush' is not known"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_hyper_parameters_are_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tiny(**changes)

    assert "\n" not in str(caught.value)
