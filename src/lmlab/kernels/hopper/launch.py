"""Launching the warp-specialized kernels; the portable ones run where these cannot.

They need TMA, 16-bit types, no split-KV and, in the backward, as many key heads as query heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmlab.kernels.configs import Tiles
from lmlab.kernels.hopper.bwd_dkdv import flash_bwd_dkdv_kernel
from lmlab.kernels.hopper.bwd_dq import flash_bwd_dq_kernel
from lmlab.kernels.hopper.bwd_fused import flash_bwd_fused_kernel
from lmlab.kernels.hopper.bwd_fused_d128 import flash_bwd_fused_d128_kernel
from lmlab.kernels.hopper.fwd import flash_fwd_hopper_kernel
from lmlab.kernels.problem import Plan, Problem, ceil_div, device_info
from lmlab.kernels.views import row_strides, supports_tma, tma_strides
from lmlab.kernels.workspace import semaphores

Tensors = tuple[Tensor, ...]
WG_ROWS = 64
"""Resident rows of one warpgroup."""
LOG2E = 1.4426950408889634
FUSED_HEADS = 16
"""Heads scheduled together in the fused backward: enough that no program waits long for another."""


def can_forward(problem: Problem, tiles: Tiles, plan: Plan, tensors: Tensors) -> bool:
    """Whether the forward kernel can run these tensors with these tiles."""
    has_shape = tiles.block_m in (2 * WG_ROWS, 3 * WG_ROWS) and plan.splits == 1
    return has_shape and _runs_on_hopper(problem, tiles, tensors)


def can_backward(problem: Problem, tiles: Tiles, tensors: Tensors) -> bool:
    """Whether the backward kernels can; the last tensor is the log-sum-exp."""
    has_shape = tiles.block_n == 2 * WG_ROWS and problem.group_size == 1
    return has_shape and _runs_on_hopper(problem, tiles, tensors)


def _runs_on_hopper(problem: Problem, tiles: Tiles, tensors: Tensors) -> bool:
    is_hopper = device_info(problem.device).architecture == "hopper"
    has_16_bit = problem.dtype.itemsize == 2
    return tiles.warp_specialized and is_hopper and has_16_bit and all(map(supports_tma, tensors))


def launch_forward(
    problem: Problem, inputs: Tensors, outputs: Tensors, scale: float, tiles: Tiles, plan: Plan
) -> Any:
    """One launch of (q, k, v) to (o, lse); returns the compiled kernel."""
    (q, k, v), (o, lse), block_d = inputs, outputs, plan.constants["BLOCK_D"]
    return flash_fwd_hopper_kernel[(plan.programs,)](
        _tile(q, WG_ROWS, block_d), _tile(k, tiles.block_n, block_d),
        _tile(v, tiles.block_n, block_d), o, lse, row_strides(o), scale * LOG2E,
        problem.batch_heads, problem.heads, problem.group_size, plan.l2_heads,
        problem.queries, problem.keys,
        CONSUMERS=tiles.block_m // WG_ROWS, BLOCK_N=tiles.block_n, **_constants(tiles, plan),
    )  # fmt: skip


def launch_backward(
    problem: Problem, inputs: Tensors, grads: Tensors, scale: float, tiles: Tiles, plan: Plan
) -> Any:
    """One fused launch of (grad_o, q, k, v, lse, delta) to the gradients, or one for dK and dV and
    one for dQ; returns the first compiled kernel.
    """
    grad_o, q, k, v, lse, delta = inputs
    grad_q, grad_k, grad_v = grads
    block_d, block_m = plan.constants["BLOCK_D"], tiles.block_m
    constants = _constants(tiles, plan) | {"CONSUMERS": tiles.block_n // WG_ROWS}
    key_tiles = ceil_div(problem.keys, tiles.block_n)
    query_tiles = ceil_div(problem.queries, tiles.block_n)
    streamed_queries = (
        _tile(q, block_m, block_d), _tile(k, WG_ROWS, block_d), _tile(v, WG_ROWS, block_d),
        _tile(grad_o, block_m, block_d), _vector(lse, block_m), _vector(delta, block_m),
    )  # fmt: skip
    heads, lengths = (problem.batch_heads, problem.heads), (problem.queries, problem.keys)
    if _can_fuse(problem, tiles, block_d):
        programs = key_tiles * problem.batch_heads
        padded = ceil_div(problem.queries, WG_ROWS) * WG_ROWS
        dq_accum = q.new_empty(problem.batch_heads * padded * block_d, dtype=torch.float32)
        fused = flash_bwd_fused_kernel if block_d == WG_ROWS else flash_bwd_fused_d128_kernel
        return fused[(programs,)](
            *streamed_queries, dq_accum, semaphores(programs, q.device),
            *grads, *map(row_strides, grads), scale,
            *heads, min(problem.batch_heads, FUSED_HEADS), *lengths, BLOCK_M=block_m, **constants,
        )  # fmt: skip
    compiled = flash_bwd_dkdv_kernel[(key_tiles * problem.batch_heads,)](
        *streamed_queries, grad_k, grad_v, row_strides(grad_k), row_strides(grad_v), scale,
        *heads, plan.l2_heads, *lengths, BLOCK_M=block_m, **constants,
    )  # fmt: skip
    # The dQ pass uses the tile transposed: BLOCK_N queries are resident, BLOCK_M keys streamed.
    flash_bwd_dq_kernel[(query_tiles * problem.batch_heads,)](
        _tile(q, WG_ROWS, block_d), _tile(k, block_m, block_d), _tile(v, block_m, block_d),
        _tile(grad_o, WG_ROWS, block_d), lse, delta, grad_q, row_strides(grad_q), scale,
        *heads, 1, plan.l2_heads, *lengths, BLOCK_N=block_m, **constants,
    )  # fmt: skip
    return compiled


def _can_fuse(problem: Problem, tiles: Tiles, block_d: int) -> bool:
    """Whether the fused kernels can run.

    At head dimension 128 an iteration issues the next one's scores before it frees its own stage,
    hence two stages. Without a causal mask no key tile may be ragged: keys past the end read as
    zeros, and their P = exp(-lse) is infinite where all scores are low. Their dK and dV rows are
    not stored, but the fused pass would add infinity times zero to dQ.
    """
    has_shape = block_d in (WG_ROWS, 2 * WG_ROWS) and tiles.block_m == WG_ROWS and tiles.stages > 1
    return tiles.fused and has_shape and (problem.is_causal or problem.keys % tiles.block_n == 0)


def _constants(tiles: Tiles, plan: Plan) -> dict[str, Any]:
    shared = {name: plan.constants[name] for name in ("BLOCK_D", "HEAD_DIM", "IS_CAUSAL")}
    # Four warps are one warpgroup; the others are requested inside the kernel.
    return shared | {"STAGES": tiles.stages, "num_warps": 4}


def _tile(tensor: Tensor, rows: int, columns: int) -> Any:
    """A descriptor for tiles in the shared-memory layout that wgmma reads."""
    block, layout = [1, 1, rows, columns], _tile_layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), tma_strides(tensor), block, layout)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Cached, because computing it dominates the host cost of a descriptor."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def _vector(numbers: Tensor, length: int) -> Any:
    """A descriptor for one number per query, in vectors of that length."""
    block, strides = [1, 1, length], tma_strides(numbers)
    return TensorDescriptor(numbers, list(numbers.shape), strides, block, _VECTOR_LAYOUT)
