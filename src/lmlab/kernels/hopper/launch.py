"""Planning the launches of the warp-specialized kernels; the portable ones run where these cannot.

These need TMA, 16-bit types, no split-KV and, in the backward, as many key heads as query heads.
"""

from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmlab.kernels.call import Call
from lmlab.kernels.configs import Tiles, can_rotate, dq_block_n, q_slots
from lmlab.kernels.hopper.bwd_dkdv import flash_bwd_dkdv_kernel
from lmlab.kernels.hopper.bwd_dkdv_wide import flash_bwd_dkdv_wide_kernel
from lmlab.kernels.hopper.bwd_dq import flash_bwd_dq_kernel
from lmlab.kernels.hopper.bwd_fused import flash_bwd_fused_kernel
from lmlab.kernels.hopper.fwd import flash_fwd_hopper_kernel
from lmlab.kernels.hopper.warpgroup import Shape
from lmlab.kernels.plan import Plan
from lmlab.kernels.problem import Problem, ceil_div, power_of_two
from lmlab.kernels.step import Operand, Tiled
from lmlab.kernels.views import row_strides, supports_tma, tma_strides

Operands = tuple[Operand, ...]
WG_ROWS = 64
"""Resident rows of one warpgroup."""
LOG2E = 1.4426950408889634
FUSED_HEADS = 16
"""Heads scheduled together in the fused backward, so that no program waits long for another."""
FEW_KEYS = 512
"""Up to this many keys the forward is limited by memory, and pads head dimensions 65 to 96, because
one product starts sooner than three."""


def can_forward(problem: Problem, tiles: Tiles, plan: Plan, inputs: Operands) -> bool:
    """Whether the forward kernel can run these inputs with these tiles."""
    has_shape = tiles.block_m in (2 * WG_ROWS, 3 * WG_ROWS) and plan.splits == 1
    return has_shape and _runs_on_hopper(problem, tiles, inputs)


def can_backward(problem: Problem, tiles: Tiles, operands: Operands) -> bool:
    """Whether the backward kernels can run these operands with these tiles."""
    has_shape = tiles.block_n == 2 * WG_ROWS and problem.group_size == 1
    return has_shape and _runs_on_hopper(problem, tiles, operands)


def _runs_on_hopper(problem: Problem, tiles: Tiles, operands: Operands) -> bool:
    is_supported = problem.gpu.architecture == "hopper" and problem.dtype.itemsize == 2
    return tiles.warp_specialized and is_supported and all(map(supports_tma, operands))


def add_forward(
    call: Call, problem: Problem, operands: Operands, scale: float, tiles: Tiles, plan: Plan
) -> None:
    """Add the launch that computes o and lse from q, k and v."""
    q, k, v, o, lse = operands
    chunk, chunks = _chunks(problem.head_dim, is_padded=problem.keys <= FEW_KEYS)
    programs, l2_heads = _persistent(problem, tiles, plan)
    arguments = (
        _tile(q, WG_ROWS, chunk), _tile(k, tiles.block_n, chunk),
        _tile(v, tiles.block_n, chunk), _tile(o, WG_ROWS, chunk), lse, scale * LOG2E,
        problem.batch_heads, problem.heads, problem.group_size, l2_heads,
        ceil_div(plan.programs, programs), problem.queries, problem.keys,
    )  # fmt: skip
    shape = Shape(
        tiles.block_m // WG_ROWS, tiles.block_n, chunk, chunks, tiles.stages, problem.is_causal,
        # Two consumers at head dimension 64 are as fast or faster without taking turns.
        PINGPONG=chunk * chunks > WG_ROWS or tiles.block_m > 2 * WG_ROWS,
        SLOTS=q_slots(chunk * chunks),
        HAS_MASK=problem.is_causal or problem.keys % tiles.block_n != 0,
    )  # fmt: skip
    constants = _constants(shape)
    if tiles.programs_per_sm == 2:  # 80 is what six warpgroups get before they exchange registers
        constants = _constants(replace(shape, REGISTERS=112)) | {"maxnreg": 80}
    call.add_step(flash_fwd_hopper_kernel, programs, arguments, constants)


def _persistent(problem: Problem, tiles: Tiles, plan: Plan) -> tuple[int, int]:
    """Number of programs, and of heads scheduled together.

    The fewer heads, the larger the share of their K and V in the L2. Without a mask all tiles take
    equally long, and one head follows the other. Under a causal mask persistent programs share the
    work evenly if the tiles of the heads scheduled together make two waves. Short sequences are
    limited by memory, and one wave mixes tiles that read much with tiles that read little.
    """
    resident = tiles.programs_per_sm * problem.gpu.num_sms
    query_tiles = ceil_div(problem.queries, tiles.block_m)
    is_short = problem.keys <= FEW_KEYS and problem.head_dim <= 192
    one_wave, two_waves = (
        min(places // gcd(places, query_tiles), problem.batch_heads)
        for places in (resident, 2 * resident)
    )
    # Two programs per SM are even in one wave.
    exceeds_l2 = tiles.programs_per_sm == 2 and two_waves > 2 * plan.l2_heads
    heads = one_wave if is_short or exceeds_l2 else two_waves
    # Tiles of wide heads are so large that one head after the other pays where two waves allow it.
    is_wide = problem.head_dim > 128 and not is_short and 2 * resident % query_tiles == 0
    if not problem.is_causal or is_wide:
        heads = 1
    if plan.programs > resident and heads <= 2 * plan.l2_heads:
        return resident, heads
    return plan.programs, plan.l2_heads


def add_backward(
    call: Call, problem: Problem, inputs: Operands, grads: Operands, scale: float, tiles: Tiles,
    plan: Plan,
) -> None:  # fmt: skip
    """Add one fused launch; or one for dK and dV and one for dQ, the second of which overlaps."""
    q, k, v, grad_o, lse, delta = inputs
    grad_q, grad_k, grad_v = grads
    chunk, chunks = _chunks(problem.head_dim)
    # Beyond head dimension 128 two warpgroups share a tile of 64 keys.
    is_wide = problem.head_dim > 128
    keys, block = (WG_ROWS, WG_ROWS) if is_wide else (tiles.block_n, tiles.block_m)
    shape = Shape(keys // WG_ROWS, block, chunk, chunks, tiles.stages, problem.is_causal)
    programs = ceil_div(problem.keys, keys) * problem.batch_heads
    heads, lengths = (problem.batch_heads, problem.heads), (problem.queries, problem.keys)
    arguments: tuple[Any, ...] = (
        _tile(q, block, chunk), _tile(k, WG_ROWS, chunk), _tile(v, WG_ROWS, chunk),
        _tile(grad_o, block, chunk), _vector(lse, block), _vector(delta, block),
        _tile(grad_k, WG_ROWS, chunk), _tile(grad_v, WG_ROWS, chunk),
    )  # fmt: skip
    if tiles.fused and chunk == WG_ROWS and block == WG_ROWS:
        padded = ceil_div(problem.queries, WG_ROWS) * WG_ROWS
        dq_accum = call.scratch((problem.batch_heads * padded * chunk,), (1,), torch.float32)
        is_rotated = tiles.rotated and can_rotate(problem)
        together = 1 if is_rotated else min(problem.batch_heads, FUSED_HEADS)
        arguments += (
            grad_q, dq_accum, call.add_semaphores(programs), row_strides(grad_q), scale,
            *heads, together, *lengths,
        )  # fmt: skip
        is_ragged = not problem.is_causal and problem.keys % keys != 0
        shape = replace(
            shape, DS_STAGES=3, ROTATED=is_rotated, HEAD_DIM=problem.head_dim, RAGGED_KEYS=is_ragged
        )
        call.add_step(flash_bwd_fused_kernel, programs, arguments, _constants(shape))
        return
    kernel = flash_bwd_dkdv_wide_kernel if is_wide else flash_bwd_dkdv_kernel
    arguments += scale, *heads, plan.l2_heads, *lengths
    key_pass = kernel, programs, arguments, _constants(shape)
    # The dQ pass uses the tile transposed: BLOCK_N queries are resident, keys streamed.
    block = dq_block_n(tiles, problem.head_dim, max(lengths))
    arguments = (
        _tile(q, WG_ROWS, chunk), _tile(k, block, chunk), _tile(v, block, chunk),
        _tile(grad_o, WG_ROWS, chunk), lse, delta, _tile(grad_q, WG_ROWS, chunk), scale,
        *heads, 1, plan.l2_heads, *lengths,
    )  # fmt: skip
    programs = ceil_div(problem.queries, tiles.block_n) * problem.batch_heads
    has_mask = problem.is_causal or problem.keys % block != 0
    shape = replace(shape, CONSUMERS=tiles.block_n // WG_ROWS, BLOCK=block, HAS_MASK=has_mask)
    query_pass = flash_bwd_dq_kernel, programs, arguments, _constants(shape)
    # The second launch starts on SMs that the first leaves idle; small tiles fill them best.
    first, second = (query_pass, key_pass) if is_wide else (key_pass, query_pass)
    call.add_step(*first)
    call.add_step(*second[:3], second[3] | {"launch_pdl": True})


def _chunks(head_dim: int, *, is_padded: bool = False) -> tuple[int, int]:
    """Columns per chunk of a tile, and number of chunks."""
    if 64 < head_dim <= 96 and not is_padded:
        return 32, 3
    if head_dim <= 128:
        return power_of_two(head_dim), 1
    return (64, 3) if head_dim <= 192 else (128, 2)


def _constants(shape: Shape) -> dict[str, Any]:
    # Four warps: one warpgroup; `gl.warp_specialize` in the kernel requests the others.
    return {"SHAPE": shape, "num_warps": 4}


def _tile(x: Operand, rows: int, columns: int) -> Tiled:
    """An operand in tiles with the shared-memory layout that wgmma reads."""
    layout = _tile_layout(rows, columns, x.dtype)
    return Tiled(x, tma_strides(x), (1, 1, rows, columns), TensorDescriptor, layout)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def _vector(x: Operand, length: int) -> Tiled:
    """An operand with one number per query, in vectors of `length`."""
    return Tiled(x, tma_strides(x), (1, 1, length), TensorDescriptor, _VECTOR_LAYOUT)
