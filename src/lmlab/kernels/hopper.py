"""Launching the warp-specialised kernels of Hopper; where they do not fit, the plain ones run.

They need tiles by the copy engine, 16-bit types, as many programs as there are tiles (no sharing of
keys), and backward as many heads of keys as of queries.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmlab.kernels.configs import Tiles
from lmlab.kernels.hopper_forward import hopper_forward_kernel
from lmlab.kernels.hopper_keys import hopper_keys_kernel
from lmlab.kernels.hopper_once import hopper_once_kernel
from lmlab.kernels.hopper_queries import hopper_queries_kernel
from lmlab.kernels.hopper_wide import hopper_wide_kernel
from lmlab.kernels.problem import Plan, Problem, processor
from lmlab.kernels.sharing import counters
from lmlab.kernels.views import engine_strides, has_descriptor, row_strides

ROWS = 64
"""Kept rows of one group of four warps."""
LOG2E = 1.4426950408889634
ABREAST = 16
"""Heads side by side in one walk: enough that no program waits long for the one before."""


def can_forward(problem: Problem, tiles: Tiles, plan: Plan, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the forward kernel can take these tensors in these tiles."""
    return (
        tiles.specialised
        and tiles.kept in (2 * ROWS, 3 * ROWS)
        and plan.splits == 1
        and _is_for_hopper(problem, tensors)
    )


def can_backward(problem: Problem, tiles: Tiles, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the backward kernels can; the last tensor is the log-sum-exp."""
    return (
        tiles.specialised
        and tiles.kept == 2 * ROWS
        and problem.heads == problem.kv_heads
        and _is_for_hopper(problem, tensors)
    )


def _is_for_hopper(problem: Problem, tensors: tuple[Tensor, ...]) -> bool:
    on_hopper = processor(problem.device).architecture == "hopper"
    return on_hopper and problem.dtype.itemsize == 2 and all(map(has_descriptor, tensors))


def launch_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    tiles: Tiles,
    plan: Plan,
) -> Any:
    """One launch; returns the compiled kernel."""
    width = plan.constants["BLOCK_D"]
    return hopper_forward_kernel[(plan.programs,)](
        _tile(q, ROWS, width), _tile(k, tiles.walked, width), _tile(v, tiles.walked, width),
        o, lse, row_strides(o), scale * LOG2E,
        problem.pairs, problem.heads, problem.heads // problem.kv_heads, plan.abreast,
        problem.queries, problem.keys, **_constants(tiles, plan),
    )  # fmt: skip


def launch_backward(
    problem: Problem,
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    tiles: Tiles,
    plan: Plan,
) -> Any:
    """One launch, or two, for keys and values and for queries; returns the first one's kernel."""
    width, walked = plan.constants["BLOCK_D"], tiles.walked
    # At head dimension 128 a turn starts the next one's scores before it frees its own slot.
    has_one_walk = tiles.once and tiles.stages > 1 and width in (ROWS, 2 * ROWS) and walked == ROWS
    if has_one_walk and _has_bounded_weights(problem, tiles):
        return launch_once(problem, grad_o, q, k, v, lse, delta, grads, scale, tiles, plan)
    grad_q, grad_k, grad_v = grads
    constants = _constants(tiles, plan)
    key_tiles = -(-problem.keys // tiles.kept)
    query_tiles = -(-problem.queries // tiles.kept)
    compiled = hopper_keys_kernel[(key_tiles * problem.pairs,)](
        _tile(q, walked, width), _tile(k, ROWS, width), _tile(v, ROWS, width),
        _tile(grad_o, walked, width), _row(lse, walked), _row(delta, walked),
        grad_k, grad_v, row_strides(grad_k), row_strides(grad_v), scale,
        problem.pairs, problem.heads, plan.abreast, problem.queries, problem.keys, **constants,
    )  # fmt: skip
    hopper_queries_kernel[(query_tiles * problem.pairs,)](
        _tile(q, ROWS, width), _tile(k, walked, width), _tile(v, walked, width),
        _tile(grad_o, ROWS, width), lse, delta, grad_q, row_strides(grad_q), scale,
        problem.pairs, problem.heads, 1, plan.abreast, problem.queries, problem.keys, **constants,
    )  # fmt: skip
    return compiled


def _has_bounded_weights(problem: Problem, tiles: Tiles) -> bool:
    """Whether no tile of keys reaches beyond the last one without a causal mask over it.

    Keys there read as zeros, and their weight is exp(-lse), which is infinite where all scores are
    low. No gradient of a key is written there, but one walk would add infinity times zero to dQ.
    """
    return problem.is_causal or problem.keys % tiles.kept == 0


def launch_once(
    problem: Problem,
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    tiles: Tiles,
    plan: Plan,
) -> Any:
    """One launch for all three gradients; returns the compiled kernel."""
    width, walked = plan.constants["BLOCK_D"], tiles.walked
    rows = -(-problem.queries // ROWS) * ROWS
    sums = q.new_empty(problem.pairs * rows * width, dtype=torch.float32)
    programs = -(-problem.keys // tiles.kept) * problem.pairs
    kernel = hopper_once_kernel if width == ROWS else hopper_wide_kernel
    return kernel[(programs,)](
        _tile(q, walked, width), _tile(k, ROWS, width), _tile(v, ROWS, width),
        _tile(grad_o, walked, width), _row(lse, walked), _row(delta, walked),
        sums, counters(programs, q.device), *grads, *map(row_strides, grads), scale,
        problem.pairs, problem.heads, min(problem.pairs, ABREAST), problem.queries, problem.keys,
        **_constants(tiles, plan),
    )  # fmt: skip


def _constants(tiles: Tiles, plan: Plan) -> dict[str, Any]:
    same = {name: plan.constants[name] for name in ("WALKED", "BLOCK_D", "HEAD_DIM", "IS_CAUSAL")}
    # Four warps are one group; the others are asked for inside the kernel.
    return same | {"CONSUMERS": tiles.kept // ROWS, "STAGES": tiles.stages, "num_warps": 4}


def _tile(tensor: Tensor, rows: int, columns: int) -> Any:
    """The tensor as the copy engine sees it, in tiles that the tensor cores read as they lie."""
    block = [1, 1, rows, columns]
    layout = _tile_layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), engine_strides(tensor), block, layout)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Remembered, as finding it takes the host longer than all else about a descriptor."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def _row(numbers: Tensor, length: int) -> Any:
    """One number for each query, in rows of that length."""
    strides = engine_strides(numbers)
    return TensorDescriptor(numbers, list(numbers.shape), strides, [1, 1, length], _ROW_LAYOUT)
