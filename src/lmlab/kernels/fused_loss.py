"""LM head and cross-entropy fused: the full logits tensor is never materialized.

    loss = mean over tokens of  log(sum_j exp(x . w_j)) - x . w_target

Logits are the largest tensor of a language model: 32,768 tokens and 152,000 words take 10 GB in
bf16, and a plain loss holds several such tensors. As in FlashAttention, a softmax over tiles needs
only each tile's maximum and sum. So the forward is a matmul whose programs reduce their tile of
logits to these two numbers per token instead of storing it.

The backward recomputes the tiles, turns them into softmax - onehot while they are still in
registers, and stores this gradient for one chunk of the vocabulary at a time; from it, cuBLAS
computes the gradients of inputs and weights. That makes four matmuls instead of three, and a buffer
of a few thousand columns instead of the whole vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.interpreted import kernel_for
from lmlab.kernels.principles_matmul import ordered_tile, product_tile

LARGEST_CHUNK = 8192
"""Columns of the vocabulary whose gradient exists at one time."""


@triton.jit
def logits_tile(
    hidden, weight, tokens, words, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A program's tile of logits, its row and column indices, and its column-tile index."""
    tile_rows = (tokens + BLOCK_M - 1) // BLOCK_M
    tile_columns = (words + BLOCK_N - 1) // BLOCK_N
    row, column = ordered_tile(tl.program_id(0), tile_rows, tile_columns, GROUP)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    logits = product_tile(
        hidden, weight, tl.minimum(rows, tokens - 1), tl.minimum(columns, words - 1), depth,
        depth, 1, 1, depth, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip
    return logits, rows, columns, column


@triton.jit
def loss_forward_kernel(
    hidden, weight, targets, maxima, sums, target_logits, tokens, words, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Store maximum and sum of exponentials of each row of a tile, and the target logits in it."""
    logits, rows, columns, column = logits_tile(
        hidden, weight, tokens, words, depth, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN_K
    )
    inside = rows < tokens
    logits = tl.where(columns[None, :] < words, logits, float("-inf"))
    maximum = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - maximum[:, None]), 1)
    tl.store(maxima + column.to(tl.int64) * tokens + rows, maximum, mask=inside)
    tl.store(sums + column.to(tl.int64) * tokens + rows, total, mask=inside)
    target = tl.load(targets + rows, mask=inside, other=-1)
    found = tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), 1)
    here = (target >= 0) & (target // BLOCK_N == column)
    tl.store(target_logits + rows, found, mask=inside & here)


@triton.jit
def loss_backward_kernel(
    hidden, weight, targets, lse, loss_gradient, gradient, tokens, words, depth, first_word,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Store the logits' gradient, (softmax - onehot) / tokens, for a chunk from `first_word`."""
    logits, rows, columns, _ = logits_tile(
        hidden, weight, tokens, words, depth, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN_K
    )
    inside = rows < tokens
    target = tl.load(targets + rows, mask=inside, other=-1)
    softmax = tl.exp(logits - tl.load(lse + rows, mask=inside, other=0.0)[:, None])
    onehot = tl.where(columns[None, :] + first_word == target[:, None], 1.0, 0.0)
    scaled = (softmax - onehot) * (tl.load(loss_gradient) / tokens)
    places = gradient + rows[:, None].to(tl.int64) * words + columns[None, :]
    mask = inside[:, None] & (columns[None, :] < words)
    tl.store(places, scaled.to(gradient.dtype.element_ty), mask=mask)


def tiles_for(like: Tensor) -> dict[str, int]:
    """Launch parameters: large tiles for 16-bit types, as many stages as shared memory holds."""
    if like.device.type != "cuda" or like.dtype == torch.float32:
        tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    else:
        card: Any = torch.cuda.get_device_properties(like.device)
        limit = card.shared_memory_per_block_optin
        columns = 256 if limit >= 150_000 else 128
        stages = min(4, limit // (2 * 64 * (128 + columns)))
        tiles = {"BLOCK_M": 128, "BLOCK_N": columns, "BLOCK_K": 64}
        tiles |= {"num_warps": 8, "num_stages": stages}
    return {**tiles, "GROUP": 8, "EVEN_K": like.shape[-1] % tiles["BLOCK_K"] == 0}


def grid_for(tokens: int, words: int, tiles: dict[str, int]) -> tuple[int]:
    """One program per tile."""
    return (-(-tokens // tiles["BLOCK_M"]) * -(-words // tiles["BLOCK_N"]),)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        (tokens, depth), words = hidden.shape, weight.shape[0]
        tiles = tiles_for(hidden)
        parts = -(-words // tiles["BLOCK_N"])
        maxima, sums = hidden.new_empty(2, parts, tokens, dtype=torch.float32)
        target_logits = hidden.new_full((tokens,), float("nan"), dtype=torch.float32)
        kernel_for(loss_forward_kernel, hidden.device)[grid_for(tokens, words, tiles)](
            hidden, weight.to(hidden.dtype), targets, maxima, sums, target_logits,
            tokens, words, depth, **tiles,
        )  # fmt: skip
        lse = torch.logsumexp(maxima + sums.log(), dim=0)
        ctx.save_for_backward(hidden, weight, targets, lse)
        return (lse - target_logits).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        (tokens, depth), tiles = hidden.shape, tiles_for(hidden)
        narrow = weight.to(hidden.dtype)
        count = -(-len(weight) // LARGEST_CHUNK)
        # Multiples of 64 columns keep rows of the buffer aligned for wide stores.
        size = -(-len(weight) // count // 64) * 64
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight)
        for start in range(0, len(weight), size):
            words = narrow[start : start + size]
            gradient = hidden.new_empty(tokens, len(words))
            kernel_for(loss_backward_kernel, hidden.device)[grid_for(tokens, len(words), tiles)](
                hidden, words, targets, lse, loss_gradient, gradient,
                tokens, len(words), depth, start, **tiles,
            )  # fmt: skip
            hidden_gradient += gradient @ words
            weight_gradient[start : start + size] = gradient.t() @ hidden
        return hidden_gradient.to(hidden.dtype), weight_gradient, None


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits hidden (..., d) x weight (words, d)^T for target ids.

    Not a finite number if a target is not in the vocabulary.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"fused loss: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit; allowed: (..., d), (words, d) and (...)"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    flat = hidden.flatten(0, -2).contiguous()
    loss: Tensor = _FusedLoss.apply(flat, weight, targets.flatten())
    return loss
