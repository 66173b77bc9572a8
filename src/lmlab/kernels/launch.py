"""From tensors to launches: one forward, one to three backward, with little on the host.

A short sequence takes the GPU a few microseconds, less than Python needs to think about it. So all
that follows from the shapes (tiles, grid, constants) is worked out once a shape and remembered; a
call allocates its outputs and launches.

Outputs of (batch, heads, sequence, head_dim) lie in memory as (batch, sequence, heads, head_dim).
That is the order in which a model joins its heads again, so joining is free. A gradient lies as its
input does, because autograd would copy it there otherwise.

fp32 products are exact unless TF32 is asked for, where it is asked for in PyTorch: by
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
from lmlab.kernels.interpreted import kernel_for
from lmlab.kernels.parts import split_kernel
from lmlab.kernels.problem import (
    Problem,
    backward_plan,
    delta_grid,
    forward_plan,
    pass_constants,
    processor,
    split_grid,
)
from lmlab.kernels.relaunch import start
from lmlab.kernels.sharing import counters, parts, sums
from lmlab.kernels.views import (
    addressable,
    descriptor,
    empty_by_heads,
    empty_gradient,
    empty_parts,
    has_descriptor,
    row_strides,
)

LOG2E = 1.4426950408889634


class TilesTooLarge(ValueError):
    """Tiles that were asked for by name and that this GPU cannot hold."""


Chooser = Callable[[Problem, Direction], Tiles]

_chooser: Chooser | None = None
_cuts: dict[tuple[Problem, Direction], list[Tiles]] = {}


def choose_with(chooser: Chooser | None) -> None:
    """Let `chooser` find the tiles of a problem from now on; None goes back to the table."""
    global _chooser
    _chooser = chooser
    _cuts.clear()


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp (batch, heads, queries) in natural log.

    q is (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), of one type
    and device; heads is a multiple of kv_heads. Without `tiles` the best known that fit are taken.
    """
    problem = Problem.of(q, k, is_causal)
    q, k, v = addressable(q), addressable(k), addressable(v)
    o = empty_by_heads(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)

    def launch(tiles: Tiles) -> Any:
        return launch_forward(problem, q, k, v, o, lse, scale, tiles)

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
    grad_o, q, k, v, o = (addressable(tensor) for tensor in (grad_o, q, k, v, o))
    lse = lse.contiguous()

    def launch(tiles: Tiles) -> Any:
        return launch_backward(problem, grad_o, q, k, v, o, lse, grads, scale, tiles)

    launch_fitting(problem, "backward", tiles, launch)
    return grads


def launch_fitting(
    problem: Problem, direction: Direction, tiles: Tiles | None, launch: Callable[[Tiles], Any]
) -> Any:
    """Launch with the tiles asked for, or with the best that the device can hold."""
    if not problem.pairs:
        return None
    with _on(problem.device):
        if tiles is not None:
            try:
                return launch(tiles)
            except OutOfResources as error:
                raise TilesTooLarge(f"tiles {tiles}: {error}") from error
        cuts = _cuts.get((problem, direction)) or _find_cuts(problem, direction)
        while True:
            try:
                return launch(cuts[0])
            except OutOfResources:
                # The count of shared memory was too low; what did not fit is not tried again.
                if len(cuts) == 1:
                    raise
                del cuts[0]


def _find_cuts(problem: Problem, direction: Direction) -> list[Tiles]:
    cuts = choose(problem.case(direction), processor(problem.device).shared_limit)
    if _chooser is not None:
        cuts = [_chooser(problem, direction), *cuts]
    _cuts[problem, direction] = cuts
    return cuts


def launch_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    tiles: Tiles,
) -> Any:
    """One launch; returns the compiled kernel, None from the interpreter."""
    plan = forward_plan(problem, tiles)
    if tiles.specialised:
        # Only here: what it is written in is called experimental, and most launches do without.
        from lmlab.kernels import hopper

        if hopper.can_forward(problem, tiles, plan, (q, k, v)):
            return hopper.launch_forward(problem, q, k, v, o, lse, scale, tiles, plan)
        tiles = tiles.plain()
        plan = forward_plan(problem, tiles)
    block_d = plan.constants["BLOCK_D"]
    shared: tuple[Tensor, Tensor] = (lse, lse)  # never touched by a program that shares nothing
    if plan.splits > 1:
        shared = (
            parts(plan, tiles.kept, block_d, q.device),
            counters(plan.programs // plan.splits, q.device),
        )
    numbers = (
        row_strides(q), row_strides(k), row_strides(v), row_strides(o), scale * LOG2E,
        problem.pairs, problem.heads, problem.heads // problem.kv_heads, plan.abreast,
        plan.programs, problem.queries, problem.keys,
    )  # fmt: skip
    kernel, written = kernel_for(flash_forward_kernel, q.device), (o, lse, *shared)
    if tiles.descriptors and all(map(has_descriptor, (q, k, v))):
        walked = descriptor(k, tiles.walked, block_d), descriptor(v, tiles.walked, block_d)
        return kernel[(plan.grid,)](
            descriptor(q, tiles.kept, block_d), *walked, *written, *numbers,
            **plan.constants | {"DESCRIPTOR": True},
        )  # fmt: skip
    return start(kernel, (plan.grid,), plan, (q, k, v, *written), numbers, plan.constants)


def launch_delta(problem: Problem, grad_o: Tensor, o: Tensor) -> Tensor:
    """One launch over all queries."""
    delta = _empty_delta(problem, o)
    numbers = row_strides(o), row_strides(grad_o), problem.pairs, problem.heads, problem.queries
    kernel, grid = kernel_for(delta_kernel, o.device), (delta_grid(problem),)
    start(kernel, grid, problem, (o, grad_o, delta), numbers, pass_constants(problem))
    return delta


def _empty_delta(problem: Problem, o: Tensor) -> Tensor:
    return o.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)


def launch_split(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, o: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The first four cut into parts that tensor cores take (`lmlab.kernels.parts`), and delta."""
    cut = empty_parts(q), empty_parts(k), empty_parts(v), empty_parts(grad_o)
    delta = _empty_delta(problem, o)
    tensors = q, grad_o, k, v, o, cut[0], cut[3], cut[1], cut[2], delta
    numbers = (
        *map(row_strides, (q, grad_o, k, v, o, cut[0], cut[1])),
        problem.pairs, problem.heads, problem.kv_pairs, problem.kv_heads,
        problem.queries, problem.keys,
    )  # fmt: skip
    kernel, grid = kernel_for(split_kernel, q.device), split_grid(problem)
    start(kernel, grid, problem, tensors, numbers, pass_constants(problem))
    return cut, delta


def launch_backward(
    problem: Problem,
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    tiles: Tiles,
) -> Any:
    """One to three launches; returns the compiled kernel of the gradients, as forward does."""
    plan = backward_plan(problem, tiles)
    sources = q, k, v, grad_o
    if tiles.specialised:
        from lmlab.kernels import hopper

        if hopper.can_backward(problem, tiles, (*sources, lse)):
            delta = launch_delta(problem, grad_o, o)
            return hopper.launch_backward(
                problem, grad_o, q, k, v, lse, delta, grads, scale, tiles, plan
            )
        tiles = tiles.plain()
        plan = backward_plan(problem, tiles)
    if plan.constants["PARTS"] > 1:
        sources, delta = launch_split(problem, *sources, o)
    elif plan.constants["OWN_DELTA"]:
        delta = lse  # never read
    else:
        delta = launch_delta(problem, grad_o, o)
    block_d = plan.constants["BLOCK_D"]
    shared: tuple[Tensor, Tensor] = (lse, lse)  # never touched by a program that shares nothing
    if plan.splits > 1:
        shared = (
            sums(plan, tiles.kept, block_d, q.device),
            counters(plan.programs // plan.splits, q.device),
        )
    numbers = (
        *map(row_strides, (*sources, o, *grads)), problem.batch, scale, problem.kv_pairs,
        problem.kv_heads, problem.heads // problem.kv_heads, plan.abreast, problem.queries,
        problem.keys,
    )  # fmt: skip
    kernel, others = kernel_for(flash_backward_kernel, q.device), (o, lse, delta, *grads, *shared)
    if tiles.descriptors and all(map(has_descriptor, sources)):
        walked = (descriptor(tensor, tiles.walked, block_d) for tensor in sources)
        return kernel[(plan.grid,)](
            *walked, *sources, *others, *numbers, **plan.constants | {"DESCRIPTOR": True}
        )
    tensors = *sources, *sources, *others
    return start(kernel, (plan.grid,), plan, tensors, numbers, plan.constants)


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
