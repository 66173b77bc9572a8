"""From tensors to launches: one forward, one to three backward, with little work on the host.

A short sequence takes the GPU a few microseconds, less than Python needs to plan the launch. So all
that follows from the shapes (tiles, grid, constants) is computed once per shape and cached; a call
allocates its outputs and launches.

Outputs are (batch, heads, sequence, head_dim), in memory (batch, sequence, heads, head_dim), so
that a model merges its heads without a copy. A gradient has the layout of its input, because
autograd would otherwise copy it.

fp32 products are exact unless TF32 is requested in PyTorch's own way, by
`torch.set_float32_matmul_precision("high")` or `torch.backends.cuda.matmul.fp32_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lmlab.kernels.configs import Direction, Tiles, choose
from lmlab.kernels.flash_backward import flash_backward_kernel
from lmlab.kernels.flash_delta import delta_kernel
from lmlab.kernels.flash_forward import flash_forward_kernel
from lmlab.kernels.fp32_terms import decompose_kernel
from lmlab.kernels.interpreted import kernel_for
from lmlab.kernels.launch_cache import cached_launch
from lmlab.kernels.problem import (
    Problem,
    backward_plan,
    decompose_grid,
    delta_grid,
    device_info,
    forward_plan,
    row_constants,
)
from lmlab.kernels.views import (
    addressable,
    empty_bshd,
    empty_gradient,
    empty_terms,
    row_strides,
    supports_tma,
    tma_descriptor,
)
from lmlab.kernels.workspace import split_workspace

LOG2E = 1.4426950408889634


class TilesTooLarge(ValueError):
    """Explicitly requested tiles that this GPU cannot hold."""


Tensors = tuple[Tensor, ...]
Chooser = Callable[[Problem, Direction], Tiles]

_chooser: Chooser | None = None
_choices: dict[tuple[Problem, Direction], list[Tiles]] = {}


def choose_with(chooser: Chooser | None) -> None:
    """Let `chooser` select the tiles of a problem from now on; None restores the table."""
    global _chooser
    _chooser = chooser
    _choices.clear()


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp (batch, heads, queries) in natural log.

    q is (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), of one type
    and device; heads is a multiple of kv_heads. Without `tiles`, the table in `tile_sizes` decides.
    """
    problem = Problem.of(q, k, is_causal)
    inputs = addressable(q), addressable(k), addressable(v)
    o = empty_bshd(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)

    def launch(tiles: Tiles) -> Any:
        return launch_forward(problem, inputs, (o, lse), scale, tiles)

    launch_fitting(problem, "forward", tiles, launch)
    return o, lse


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    problem = Problem.of(q, k, is_causal)
    grads = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    inputs = *map(addressable, (grad_o, q, k, v, o)), lse.contiguous()

    def launch(tiles: Tiles) -> Any:
        return launch_backward(problem, inputs, grads, scale, tiles)

    launch_fitting(problem, "backward", tiles, launch)
    return grads


def launch_fitting(
    problem: Problem, direction: Direction, tiles: Tiles | None, launch: Callable[[Tiles], Any]
) -> Any:
    """Launch with the requested tiles, or with the best that the device can hold."""
    if not problem.batch_heads:
        return None
    with _on(problem.device):
        if tiles is not None:
            try:
                return launch(tiles)
            except OutOfResources as error:
                raise TilesTooLarge(f"tiles {tiles}: {error}") from error
        choices = _choices.get((problem, direction)) or _choose(problem, direction)
        while True:
            try:
                return launch(choices[0])
            except OutOfResources:
                # The estimate of shared memory was too low; do not try these tiles again.
                if len(choices) == 1:
                    raise
                del choices[0]


def _choose(problem: Problem, direction: Direction) -> list[Tiles]:
    choices = choose(problem.case(direction), device_info(problem.device).shared_limit)
    if _chooser is not None:
        choices = [_chooser(problem, direction), *choices]
    _choices[problem, direction] = choices
    return choices


def launch_forward(
    problem: Problem, inputs: Tensors, outputs: Tensors, scale: float, tiles: Tiles
) -> Any:
    """One launch of (q, k, v) to (o, lse); returns the compiled kernel, None if interpreted."""
    (q, k, v), (o, lse) = inputs, outputs
    plan = forward_plan(problem, tiles)
    if tiles.warp_specialized:
        # Not at the top: Gluon is experimental, and most launches do without it.
        from lmlab.kernels.hopper import launch as hopper

        if hopper.can_forward(problem, tiles, plan, inputs):
            return hopper.launch_forward(problem, inputs, outputs, scale, tiles, plan)
        tiles = tiles.portable()
        plan = forward_plan(problem, tiles)
    block_d = plan.constants["BLOCK_D"]
    # A partial is an accumulator with a row sum and a row maximum per query.
    workspace = split_workspace(plan, tiles.block_m * (block_d + 2), q.device, unused=lse)
    numbers = (
        row_strides(q), row_strides(k), row_strides(v), row_strides(o), scale * LOG2E,
        problem.batch_heads, problem.heads, problem.group_size, plan.l2_heads,
        plan.programs, problem.queries, problem.keys,
    )  # fmt: skip
    kernel, written = kernel_for(flash_forward_kernel, q.device), (o, lse, *workspace)
    if tiles.tma and all(map(supports_tma, inputs)):
        rows = tiles.block_m, tiles.block_n, tiles.block_n
        descriptors = (tma_descriptor(x, n, block_d) for x, n in zip(inputs, rows, strict=True))
        constants = plan.constants | {"DESCRIPTOR": True}
        return kernel[(plan.grid,)](*descriptors, *written, *numbers, **constants)
    return cached_launch(kernel, (plan.grid,), plan, (*inputs, *written), numbers, plan.constants)


def launch_delta(problem: Problem, grad_o: Tensor, o: Tensor) -> Tensor:
    """delta = rowsum(o * grad_o) in one launch."""
    delta = _empty_delta(problem, o)
    numbers = (
        row_strides(o), row_strides(grad_o), problem.batch_heads, problem.heads, problem.queries
    )  # fmt: skip
    kernel, tensors = kernel_for(delta_kernel, o.device), (o, grad_o, delta)
    cached_launch(kernel, delta_grid(problem), problem, tensors, numbers, row_constants(problem))
    return delta


def _empty_delta(problem: Problem, o: Tensor) -> Tensor:
    return o.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)


def launch_decompose(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, o: Tensor
) -> tuple[Tensors, Tensor]:
    """The first four as bf16 terms (`lmlab.kernels.fp32_terms`), and delta, in one launch."""
    terms = empty_terms(q), empty_terms(k), empty_terms(v), empty_terms(grad_o)
    delta = _empty_delta(problem, o)
    tensors = q, grad_o, k, v, o, terms[0], terms[3], terms[1], terms[2], delta
    numbers = (
        *map(row_strides, (q, grad_o, k, v, o, terms[0], terms[1])), problem.batch_heads,
        problem.heads, problem.batch_kv_heads, problem.kv_heads, problem.queries, problem.keys,
    )  # fmt: skip
    kernel, grid = kernel_for(decompose_kernel, q.device), decompose_grid(problem)
    cached_launch(kernel, grid, problem, tensors, numbers, row_constants(problem))
    return terms, delta


def launch_backward(
    problem: Problem, inputs: Tensors, grads: Tensors, scale: float, tiles: Tiles
) -> Any:
    """One to three launches of (grad_o, q, k, v, o, lse) to the gradients of q, k and v.

    Returns the compiled kernel of the gradients, None if interpreted.
    """
    grad_o, q, k, v, o, lse = inputs
    plan = backward_plan(problem, tiles)
    sources: Tensors = (q, k, v, grad_o)
    if tiles.warp_specialized:
        from lmlab.kernels.hopper import launch as hopper

        if hopper.can_backward(problem, tiles, (*sources, lse)):
            delta = launch_delta(problem, grad_o, o)
            inputs = grad_o, q, k, v, lse, delta
            return hopper.launch_backward(problem, inputs, grads, scale, tiles, plan)
        tiles = tiles.portable()
        plan = backward_plan(problem, tiles)
    if plan.constants["TERMS"] > 1:
        sources, delta = launch_decompose(problem, q, k, v, grad_o, o)
    elif plan.constants["INLINE_DELTA"]:
        delta = lse  # not read
    else:
        delta = launch_delta(problem, grad_o, o)
    block_d = plan.constants["BLOCK_D"]
    # A partial is two accumulators, dK and dV.
    workspace = split_workspace(plan, 2 * tiles.block_n * block_d, q.device, unused=lse)
    numbers = (
        *map(row_strides, (*sources, o, *grads)), problem.batch, scale, problem.batch_kv_heads,
        problem.kv_heads, problem.group_size, plan.l2_heads, problem.queries, problem.keys,
    )  # fmt: skip
    kernel = kernel_for(flash_backward_kernel, q.device)
    others = o, lse, delta, *grads, *workspace
    if tiles.tma and all(map(supports_tma, sources)):
        descriptors = (tma_descriptor(x, tiles.block_m, block_d) for x in sources)
        constants = plan.constants | {"DESCRIPTOR": True}
        return kernel[(plan.grid,)](*descriptors, *sources, *others, *numbers, **constants)
    tensors = *sources, *sources, *others
    return cached_launch(kernel, (plan.grid,), plan, tensors, numbers, plan.constants)


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
