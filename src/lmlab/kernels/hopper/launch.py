"""Planning the launches of the warp-specialized kernels; the portable ones run where these cannot.

They need TMA, 16-bit types, no split-KV and, in the backward, as many key heads as query heads.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmlab.kernels.call import Call
from lmlab.kernels.configs import Tiles, q_slots
from lmlab.kernels.hopper.bwd_dkdv import flash_bwd_dkdv_kernel
from lmlab.kernels.hopper.bwd_dq import flash_bwd_dq_kernel
from lmlab.kernels.hopper.bwd_fused import flash_bwd_fused_kernel
from lmlab.kernels.hopper.bwd_fused_d128 import flash_bwd_fused_d128_kernel
from lmlab.kernels.hopper.fwd import flash_fwd_hopper_kernel
from lmlab.kernels.problem import Plan, Problem, ceil_div, device_info
from lmlab.kernels.step import Operand, Step, Tiled
from lmlab.kernels.views import row_strides, supports_tma, tma_strides

Operands = tuple[Operand, ...]
WG_ROWS = 64
"""Resident rows of one warpgroup."""
LOG2E = 1.4426950408889634
FUSED_HEADS = 16
"""Heads scheduled together in the fused backward: enough that no program waits long for another."""


def can_forward(
    problem: Problem, tiles: Tiles, plan: Plan, inputs: Operands, is_aligned: bool
) -> bool:
    """Whether the forward kernel can run these inputs with these tiles."""
    has_shape = tiles.block_m in (2 * WG_ROWS, 3 * WG_ROWS) and plan.splits == 1
    return has_shape and is_aligned and _runs_on_hopper(problem, tiles, inputs)


def can_backward(problem: Problem, tiles: Tiles, operands: Operands, is_aligned: bool) -> bool:
    """Whether the backward kernels can."""
    has_shape = tiles.block_n == 2 * WG_ROWS and problem.group_size == 1
    return has_shape and is_aligned and _runs_on_hopper(problem, tiles, operands)


def _runs_on_hopper(problem: Problem, tiles: Tiles, operands: Operands) -> bool:
    is_hopper = device_info(problem.device).architecture == "hopper"
    has_16_bit = problem.dtype.itemsize == 2
    return tiles.warp_specialized and is_hopper and has_16_bit and all(map(supports_tma, operands))


def add_forward(
    call: Call, problem: Problem, operands: Operands, scale: float, tiles: Tiles, plan: Plan
) -> None:
    """One launch of q, k, v to o, lse."""
    q, k, v, o, lse = operands
    block_d = plan.constants["BLOCK_D"]
    programs, l2_heads = _persistent(problem, tiles, plan)
    arguments = (
        _tile(q, WG_ROWS, block_d), _tile(k, tiles.block_n, block_d),
        _tile(v, tiles.block_n, block_d), _tile(o, WG_ROWS, block_d), lse, scale * LOG2E,
        problem.batch_heads, problem.heads, problem.group_size, l2_heads,
        ceil_div(plan.programs, programs), problem.queries, problem.keys,
    )  # fmt: skip
    sizes = {"CONSUMERS": tiles.block_m // WG_ROWS, "BLOCK_N": tiles.block_n}
    sizes |= {"PINGPONG": tiles.paired, "SLOTS": q_slots(tiles, block_d)}
    constants = sizes | _constants(tiles, plan)
    call.steps.append(Step(flash_fwd_hopper_kernel, (programs,), arguments, constants, True))


def _persistent(problem: Problem, tiles: Tiles, plan: Plan) -> tuple[int, int]:
    """Programs, and heads scheduled together.

    Persistent programs share the work evenly if the tiles of the heads scheduled together make an
    even number of turns.
    """
    num_sms = device_info(problem.device).num_sms
    if not tiles.persistent or plan.programs <= num_sms:
        return plan.programs, plan.l2_heads
    query_tiles = ceil_div(problem.queries, tiles.block_m)
    unit = 2 * num_sms // gcd(2 * num_sms, query_tiles)
    fitting = [
        heads
        for heads in (problem.batch_heads, *range(unit, problem.batch_heads, unit))
        if heads <= 2 * plan.l2_heads
    ]
    if not fitting:
        return plan.programs, plan.l2_heads
    # A small rest would take the time of its longest tile.
    return num_sms, min(fitting, key=lambda heads: (-problem.batch_heads % heads, -heads))


def add_backward(
    call: Call,
    problem: Problem,
    inputs: Operands,
    grads: Operands,
    scale: float,
    tiles: Tiles,
    plan: Plan,
) -> None:
    """One fused launch of q, k, v, grad_o, lse, delta, or one for dK and dV and one for dQ."""
    q, k, v, grad_o, lse, delta = inputs
    grad_q, grad_k, grad_v = grads
    block_d, block_m = plan.constants["BLOCK_D"], tiles.block_m
    constants = _constants(tiles, plan) | {"CONSUMERS": tiles.block_n // WG_ROWS}
    programs = ceil_div(problem.keys, tiles.block_n) * problem.batch_heads

    def dkdv(rows: int) -> tuple[Tiled, ...]:
        return (
            _tile(q, rows, block_d), _tile(k, WG_ROWS, block_d), _tile(v, WG_ROWS, block_d),
            _tile(grad_o, rows, block_d), _vector(lse, rows), _vector(delta, rows),
            _tile(grad_k, WG_ROWS, block_d), _tile(grad_v, WG_ROWS, block_d),
        )  # fmt: skip

    heads, lengths = (problem.batch_heads, problem.heads), (problem.queries, problem.keys)
    if _can_fuse(tiles, block_d):
        kernel = flash_bwd_fused_kernel if block_d == WG_ROWS else flash_bwd_fused_d128_kernel
        padded = ceil_div(problem.queries, WG_ROWS) * WG_ROWS
        dq_accum = call.scratch((problem.batch_heads * padded * block_d,), (1,), torch.float32)
        arguments = (
            *dkdv(block_m), grad_q, dq_accum, call.add_semaphores(programs),
            row_strides(grad_q), scale, *heads, min(problem.batch_heads, FUSED_HEADS), *lengths,
        )  # fmt: skip
        is_ragged = not problem.is_causal and problem.keys % tiles.block_n != 0
        constants |= {
            "BLOCK_M": block_m, "HEAD_DIM": problem.head_dim, "RAGGED_KEYS": is_ragged
        }  # fmt: skip
        call.steps.append(Step(kernel, (programs,), arguments, constants, True))
        return
    for needs_dk, needs_dv in ((True, True),) if block_d < 256 else ((True, False), (False, True)):
        # dV alone needs no V: there is memory for blocks of twice as many queries.
        rows = block_m if needs_dk else 2 * block_m
        arguments = (*dkdv(rows), scale, *heads, plan.l2_heads, *lengths)
        options = {"BLOCK_M": rows, "NEEDS_DK": needs_dk, "NEEDS_DV": needs_dv}
        if not needs_dk:
            options["STAGES"] = 2
        step = Step(flash_bwd_dkdv_kernel, (programs,), arguments, constants | options, True)
        call.steps.append(step)
    # The dQ pass uses the tile transposed: BLOCK_N queries are resident, BLOCK_M keys streamed.
    arguments = (
        _tile(q, WG_ROWS, block_d), _tile(k, block_m, block_d), _tile(v, block_m, block_d),
        _tile(grad_o, WG_ROWS, block_d), lse, delta, _tile(grad_q, WG_ROWS, block_d), scale,
        *heads, 1, plan.l2_heads, *lengths,
    )  # fmt: skip
    programs = ceil_div(problem.queries, tiles.block_n) * problem.batch_heads
    dq_constants = constants | {"BLOCK_N": block_m}
    call.steps.append(Step(flash_bwd_dq_kernel, (programs,), arguments, dq_constants, True))


def _can_fuse(tiles: Tiles, block_d: int) -> bool:
    """Whether the fused kernels can run.

    At head dimension 128 an iteration issues the next one's scores before it frees its own stage,
    hence two stages.
    """
    has_shape = block_d in (WG_ROWS, 2 * WG_ROWS) and tiles.block_m == WG_ROWS
    return tiles.fused and has_shape and tiles.stages > 1


def _constants(tiles: Tiles, plan: Plan) -> dict[str, Any]:
    shared = {name: plan.constants[name] for name in ("BLOCK_D", "IS_CAUSAL")}
    # Four warps are one warpgroup; the others are requested inside the kernel.
    return shared | {"STAGES": tiles.stages, "num_warps": 4}


def _tile(x: Operand, rows: int, columns: int) -> Tiled:
    """Tiles in the shared-memory layout that wgmma reads."""
    layout = _tile_layout(rows, columns, x.dtype)
    return Tiled(x, tma_strides(x), (1, 1, rows, columns), TensorDescriptor, layout)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def _vector(x: Operand, length: int) -> Tiled:
    """One number per query, in vectors of that length."""
    return Tiled(x, tma_strides(x), (1, 1, length), TensorDescriptor, _VECTOR_LAYOUT)
