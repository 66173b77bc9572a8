"""Attention calls as kernel launches: one forward, one to three backward, with little host work.

A short sequence takes the GPU a few microseconds, less than Python needs to plan the launch. So a
call is planned once (tiles, grid, buffers, constants) for its shapes, strides and types, and
cached; later calls like it only allocate their results and launch.

Outputs are (batch, heads, sequence, head_dim), in memory (batch, sequence, heads, head_dim), so
that a model merges its heads without a copy. A gradient has the layout of its input, because
autograd would otherwise copy it. Per-query vectors (log-sum-exp, delta) have rows padded to 16
bytes, so that TMA can read them at any length.

Products of fp32 tensors have fp32 accuracy unless TF32 is enabled through PyTorch's own settings,
`torch.set_float32_matmul_precision("high")` or `torch.backends.cuda.matmul.fp32_precision`.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from lmlab.kernels.call import ALIGNMENT, Call
from lmlab.kernels.configs import BF16_TERMS, Tiles, choose, has_ranks
from lmlab.kernels.flash_backward import flash_backward_kernel
from lmlab.kernels.flash_delta import delta_kernel
from lmlab.kernels.flash_forward import flash_forward_kernel
from lmlab.kernels.fp32_terms import decompose_kernel
from lmlab.kernels.plan import (
    Plan,
    backward_plan,
    decompose_grid,
    delta_programs,
    forward_plan,
    row_constants,
)
from lmlab.kernels.problem import Direction, Problem
from lmlab.kernels.step import Operand, Tiled
from lmlab.kernels.views import (
    addressable,
    bshd_strides,
    gradient_strides,
    row_strides,
    supports_tma,
    tma_strides,
    vector_strides,
)

LOG2E = 1.4426950408889634
MAX_CALLS = 4096
"""More than a process uses, unless its shapes keep changing."""


class TilesTooLarge(ValueError):
    """Explicitly requested tiles that this GPU cannot hold."""


_calls: dict[tuple[Any, ...], Call] = {}


def forget_calls() -> None:
    """Clear the cache of planned calls, for example after a change to the table."""
    _calls.clear()


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp (batch, heads, queries) in natural log.

    q is (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), of one type
    and device; heads is a multiple of kv_heads. Without `tiles`, the table in `tile_sizes` decides.
    """
    o, lse = _run("forward", (q, k, v), is_causal, scale, tiles)
    return o, lse


def backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    inputs = q, k, v, grad_o, o, lse
    grad_q, grad_k, grad_v = _run("backward", inputs, is_causal, scale, tiles)
    return grad_q, grad_k, grad_v


def find(
    inputs: tuple[Tensor, ...], is_causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Call | None, list[int]]:
    """The cached call for inputs like these, which then need no checks; and their addresses.

    `inputs` are q, k, v or, for the backward, q, k, v, grad_o, o, lse.
    """
    addresses = [x.data_ptr() for x in inputs]
    return _calls.get(_key(inputs, addresses, is_causal, scale, tiles)), addresses


def follow(
    forward: tuple[Call, list[int]], grad_o: Tensor, saved: tuple[Tensor, ...], *,
    is_causal: bool, scale: float,
) -> list[Tensor] | None:  # fmt: skip
    """Gradients, if the backward can be found from its cached forward, as only grad_o is new.

    `forward` is that call with the addresses of its tensors, `saved` are q, k, v, o, lse: still the
    same ones, if no hook has moved them.
    """
    cached, known = forward
    addresses = [x.data_ptr() for x in saved]
    if addresses != known[:5]:
        return None
    q, k, v, o, lse = saved
    inputs = q, k, v, grad_o, o, lse
    addresses.insert(3, grad_o.data_ptr())
    layout = grad_o.stride(), addresses[3] % ALIGNMENT, _mode(q)
    call = cached.backwards.get(layout)
    if call is None:  # the first backward after this forward, or the first with this layout
        call = _calls.get(_key(inputs, addresses, is_causal, scale, None))
        if call is None:
            return None
        cached.backwards[layout] = call
    return call(inputs, addresses)


def _mode(q: Tensor) -> tuple[bool, bool]:
    """What a plan depends on besides its tensors: TF32, and whether there are other ranks."""
    is_tf32 = q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return is_tf32, has_ranks()


def _key(
    inputs: tuple[Tensor, ...], addresses: list[int], is_causal: bool, scale: float,
    tiles: Tiles | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The cache key of a call: everything that it depends on."""
    q, k, v = inputs[:3]
    # The forward has checked that k and v match.
    checked = (v.shape, k.dtype, v.dtype, k.device, v.device) if len(inputs) == 3 else ()
    return (
        q.shape, k.shape, q.dtype, q.device, *[x.stride() for x in inputs], *checked,
        reduce(or_, addresses) % ALIGNMENT, is_causal, scale, _mode(q), tiles,
    )  # fmt: skip


def _run(
    direction: Direction, inputs: tuple[Tensor, ...], is_causal: bool, scale: float,
    tiles: Tiles | None,
) -> list[Tensor]:  # fmt: skip
    """Run a cached call; or plan, run and cache one, with requested tiles or the best that fit."""
    call, addresses = find(inputs, is_causal, scale, tiles)
    if call is not None:
        return call(inputs, addresses)
    usable = [addressable(x) for x in inputs[:5]] + [_padded(x) for x in inputs[5:]]
    problem = Problem.of(usable[0], usable[1], is_causal, direction)
    choices = [tiles] if tiles else choose(problem)
    build = build_forward if direction == "forward" else build_backward
    while choices:
        call = build(problem, usable, scale, choices.pop(0))
        try:
            results = call(usable, [])
        except OutOfResources as error:  # the estimate of shared memory was too low
            if tiles is not None:
                raise TilesTooLarge(f"tiles {tiles}: {error}") from error
            if not choices:
                raise
            continue
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        if all(a is b for a, b in zip(usable, inputs, strict=True)):
            _calls[_key(inputs, addresses, is_causal, scale, tiles)] = call
        break
    return results


def compiled_kernel(inputs: tuple[Tensor, ...], is_causal: bool, scale: float, tiles: Tiles) -> Any:
    """The compiled kernel with the most shared memory in a cached call; None if interpreted.

    `inputs` are those of `find`.
    """
    addresses = [x.data_ptr() for x in inputs]
    steps = _calls[_key(inputs, addresses, is_causal, scale, tiles)].steps
    kernels = [step.compiled for step in steps if step.compiled is not None]
    return max(kernels, key=lambda kernel: kernel.metadata.shared, default=None)


def _padded(vectors: Tensor) -> Tensor:
    """The log-sum-exp with rows padded as by our forward; a copy if it came from elsewhere."""
    strides = vector_strides(vectors.shape)
    if vectors.stride() == strides:
        return vectors
    return vectors.new_empty_strided(vectors.shape, strides).copy_(vectors)


def build_forward(problem: Problem, inputs: Sequence[Tensor], scale: float, tiles: Tiles) -> Call:
    """One launch of (q, k, v) to (o, lse)."""
    call = Call.of(inputs)
    q, k, v = call.operands
    o = call.result(q.shape, bshd_strides(q.shape), q.dtype)
    lse = call.result(q.shape[:3], vector_strides(q.shape[:3]), torch.float32)
    if not problem.batch_heads:
        return call
    plan = forward_plan(problem, tiles)
    if tiles.warp_specialized:
        # Not imported at the top: Gluon is experimental, and most launches do not need it.
        from lmlab.kernels.hopper import launch as hopper

        if call.is_aligned and hopper.can_forward(problem, tiles, plan, (q, k, v)):
            hopper.add_forward(call, problem, (q, k, v, o, lse), scale, tiles, plan)
            return call
        tiles = tiles.portable(problem)
        plan = forward_plan(problem, tiles)
    block_d = plan.constants["BLOCK_D"]
    # A partial is an accumulator with a row sum and a row maximum per query.
    partials, semaphores = _add_splits(call, plan, tiles.block_m * (block_d + 2), lse)
    numbers = (
        *map(row_strides, (q, k, v, o)), scale * LOG2E,
        problem.batch_heads, problem.heads, problem.group_size, plan.l2_heads,
        problem.queries, problem.keys,
    )  # fmt: skip
    constants = plan.constants
    streamed: tuple[Operand | Tiled, ...] = q, k, v
    if tiles.tma and call.is_aligned and all(map(supports_tma, (q, k, v))):
        rows = tiles.block_m, tiles.block_n, tiles.block_n
        streamed = tuple(_tiled(x, n, block_d) for x, n in zip((q, k, v), rows, strict=True))
        constants = constants | {"DESCRIPTOR": True}
    arguments = *streamed, o, lse, partials, semaphores, *numbers
    call.add_step(flash_forward_kernel, plan.programs, arguments, constants)
    return call


def build_backward(problem: Problem, inputs: Sequence[Tensor], scale: float, tiles: Tiles) -> Call:
    """One to three launches of (q, k, v, grad_o, o, lse) to the gradients of q, k and v."""
    call = Call.of(inputs)
    q, k, v, grad_o, o, lse = call.operands
    grads = tuple(
        call.result(x.shape, gradient_strides(tensor), x.dtype)
        for x, tensor in zip((q, k, v), inputs, strict=False)
    )
    if not problem.batch_heads:
        return call
    plan = backward_plan(problem, tiles)
    sources: tuple[Operand, ...] = q, k, v, grad_o
    if tiles.warp_specialized:
        from lmlab.kernels.hopper import launch as hopper

        if call.is_aligned and hopper.can_backward(problem, tiles, (*sources, *grads)):
            delta = _add_delta(call, problem, grad_o, o)
            hopper.add_backward(call, problem, (*sources, lse, delta), grads, scale, tiles, plan)
            return call
        tiles = tiles.portable(problem)
        plan = backward_plan(problem, tiles)
    if plan.constants["TERMS"] > 1:
        sources, delta = _add_decompose(call, problem)
    elif plan.constants["INLINE_DELTA"]:
        delta = lse  # not read
    else:
        delta = _add_delta(call, problem, grad_o, o)
    block_d = plan.constants["BLOCK_D"]
    # A partial is two accumulators, dK and dV.
    partials, semaphores = _add_splits(call, plan, 2 * tiles.block_n * block_d, lse)
    numbers = (
        *map(row_strides, (*sources, o, *grads)), problem.batch, scale, problem.batch_kv_heads,
        problem.kv_heads, problem.group_size, plan.l2_heads, problem.queries, problem.keys,
    )  # fmt: skip
    constants = plan.constants
    streamed: tuple[Operand | Tiled, ...] = sources
    if tiles.tma and call.is_aligned and all(map(supports_tma, sources)):
        streamed = tuple(_tiled(x, tiles.block_m, block_d) for x in sources)
        constants = constants | {"DESCRIPTOR": True}
    arguments = *streamed, *sources, o, lse, delta, *grads, partials, semaphores, *numbers
    call.add_step(flash_backward_kernel, plan.programs, arguments, constants)
    return call


def _add_splits(call: Call, plan: Plan, elements: int, unused: Operand) -> tuple[Operand, Operand]:
    """Add partials (`elements` fp32 numbers per program) and semaphores; `unused` if unsplit."""
    if plan.splits == 1:
        return unused, unused
    partials = call.scratch((plan.programs * elements,), (1,), torch.float32)
    return partials, call.add_semaphores(plan.programs // plan.splits)


def _add_delta(call: Call, problem: Problem, grad_o: Operand, o: Operand) -> Operand:
    """Add the launch that computes delta = rowsum(o * grad_o)."""
    delta = call.scratch(o.shape[:3], vector_strides(o.shape[:3]), torch.float32)
    arguments = (
        o, grad_o, delta, row_strides(o), row_strides(grad_o),
        problem.batch_heads, problem.heads, problem.queries,
    )  # fmt: skip
    call.add_step(delta_kernel, delta_programs(problem), arguments, row_constants(problem))
    return delta


def _add_decompose(call: Call, problem: Problem) -> tuple[tuple[Operand, ...], Operand]:
    """Add the launch that computes delta and the bf16 terms (`fp32_terms`) of q, k, v, grad_o."""
    q, k, v, grad_o, o, _ = call.operands[:6]
    terms = []
    for x in (q, k, v, grad_o):
        batch, heads, rows, columns = x.shape
        strides = heads * rows * columns, rows * columns, columns, 1
        terms.append(
            call.scratch((BF16_TERMS * batch, *x.shape[1:]), strides, term_dtype(call.device))
        )
    delta = call.scratch(o.shape[:3], vector_strides(o.shape[:3]), torch.float32)
    arguments = (
        q, grad_o, k, v, o, terms[0], terms[3], terms[1], terms[2], delta,
        *map(row_strides, (q, grad_o, k, v, o, terms[0], terms[1])), problem.batch_heads,
        problem.heads, problem.batch_kv_heads, problem.kv_heads, problem.queries, problem.keys,
    )  # fmt: skip
    call.add_step(decompose_kernel, decompose_grid(problem), arguments, row_constants(problem))
    return tuple(terms), delta


def term_dtype(device: torch.device) -> torch.dtype:
    """Type of the terms: bf16, or fp32 for the interpreter, which cannot multiply bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _tiled(x: Operand, rows: int, columns: int) -> Tiled:
    """An operand read by TMA in tiles of rows x columns of one head."""
    return Tiled(x, tma_strides(x), (1, 1, rows, columns), TensorDescriptor)
