"""The language model that is measured: a pre-norm Transformer decoder.

    tokens -> embedding -> L x [x + attn(norm(x)), then x + ffn(norm(x))] -> norm -> head -> logits

Each branch normalizes its own input and the residual stream is never normalized, so the gradient
has a path of plain additions from the logits to the embedding. Under autocast the stream stays in
fp32 (the embedding is fp32, and fp32 + bf16 is fp32); only the branches run in 16 bit.

Parameter names are fixed by existing checkpoints. The attention function comes from the registry.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.attention.registry import Attention
from lmlab.model.layers import (
    Embedding,
    Factory,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    at_least_fp32,
)
from lmlab.model.shape import check_heads, check_positive_integers, check_rope_theta


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention with RoPE."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryEmbedding,
        attention: Attention,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.rope = rope
        self.attention = attention
        self.q_proj = Linear(d_model, d_model, **factory)
        self.k_proj = Linear(d_model, d_model, **factory)
        self.v_proj = Linear(d_model, d_model, **factory)
        self.output_proj = Linear(d_model, d_model, **factory)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(batch, sequence, d_model) to the same shape."""
        q, k = self.rope(self._heads(self.q_proj(x_BTD)), self._heads(self.k_proj(x_BTD)))
        v = self._heads(self.v_proj(x_BTD))
        mixed_BHTd = self.attention(q, k, v, is_causal=True)
        output: Tensor = self.output_proj(mixed_BHTd.transpose(1, 2).flatten(-2))
        return output

    def _heads(self, x_BTD: Tensor) -> Tensor:
        """(batch, sequence, d_model) to (batch, heads, sequence, head_dim)."""
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each with a normalized input and a residual connection."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding,
        attention: Attention,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(d_model, **factory)
        self.attn = CausalSelfAttention(d_model, num_heads, rope, attention, **factory)
        self.ln2 = RMSNorm(d_model, **factory)
        self.ffn = SwiGLU(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, d_model) to the same shape."""
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocab_size)."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10000.0,
        *,
        attention: str = "naive",
        **factory: Unpack[Factory],
    ) -> None:
        check_positive_integers(
            vocab_size=vocab_size,
            context_length=context_length,
            d_model=d_model,
            num_layers=num_layers,
            num_heads=num_heads,
            d_ff=d_ff,
        )
        check_heads(d_model, num_heads)
        check_rope_theta(rope_theta)
        super().__init__()
        self.context_length = context_length
        # All layers share one pair of tables.
        wide = at_least_fp32(factory.get("dtype") or torch.get_default_dtype())
        tables: Factory = {**factory, "dtype": wide}
        rope = RotaryEmbedding(d_model // num_heads, context_length, rope_theta, **tables)
        function = registry.load(attention)
        self.token_embeddings = Embedding(vocab_size, d_model, **factory)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope, function, **factory)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, **factory)
        self.lm_head = Linear(d_model, vocab_size, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights; after `to_empty` this materializes a model built on "meta"."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding | RMSNorm | RotaryEmbedding):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token that follows each position."""
        if tokens.shape[-1] > self.context_length:
            raise ValueError(
                f"tokens must have at most context_length = {self.context_length} positions,"
                f" got {tokens.shape[-1]}"
            )
        x = self.token_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.ln_final(x))
        return logits
