"""Our kernels cut in different ways: time and shared memory against the shape of the tiles.

A program keeps a tile of `kept` rows and walks past it with tiles of `walked` rows. Larger tiles
read less memory for each product, until registers spill or shared memory ends. Every shape is an
arm: checked against the reference, timed in turns with the others, or named with the reason why
the GPU does not take it. Shared memory is said twice, by count of the tiles and by the compiler.

`data`: `flops`, `shared_limit_bytes` and `arms`, named KEPTxWALKED, `chosen` for the tiles that the
launch table takes for this problem. Each has `kept`, `walked`, `warps`, `stages`, `specialised`,
`errors`, `shared_by_count_bytes`, and `shared_bytes`, `registers`, `spills` as the compiled kernel
says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.problem import Problem, Shape, shape_of
from lmlab.chapters.attention.measure.race import budget_of, judge
from lmlab.chapters.attention.measure.reference import NAMES, errors, reference
from lmlab.chapters.attention.measure.variants import Arms, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels import launch
from lmlab.kernels.configs import Direction, Tiles, choose, shared_bytes
from lmlab.kernels.problem import Problem as KernelProblem
from lmlab.kernels.problem import processor
from lmlab.measure.clock import collector_paused
from lmlab.measure.kernel_rounds import measure_in_rounds
from lmlab.measure.precision import tf32_allowed
from lmlab.study.points import Point

CHOSEN = "chosen"
OURS = "flash"
WARPS = {16: 4, 32: 4, 64: 4, 128: 8, 256: 8}
"""Four warps share a tile of up to 64 rows, eight a larger one."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Race the tiles of one direction over one shape."""
    settings = point.settings
    asked = {**settings, **point.parameters}
    shape, direction = shape_of(asked), cast(Direction, asked["direction"])
    if asked["attention"] != OURS:
        raise Unsupported(f"attention = {asked['attention']!r} has no tiles; allowed: {OURS}")
    refuse_unsupported(asked["attention"], device, shape.dtype, shape.head_dim)
    with tf32_allowed(shape.tf32), collector_paused():
        run = Run(shape, direction, device, settings["seed"])
        cuts = {f"{kept}x{walked}": cut(kept, walked, asked) for kept, walked in settings["tiles"]}
        cuts[CHOSEN] = run.chosen()
        arms = Arms(cuts, device)
        for name, tiles in cuts.items():
            with arms.attempt(name):
                arms.note(name, **described(tiles), **run.by_count(tiles))
                arms.note(name, **run.try_out(tiles))
                judge(name, run.errors(tiles), arms, shape.dtype)
        calls = {name: run.prepare(cuts[name]) for name in arms.running}
        times, broken = measure_in_rounds(calls, device=device, budget=budget_of(settings))
        for name, error in broken.items():
            arms.stop(name, error)
    data = {"flops": shape.flops(), "shared_limit_bytes": processor(device).shared_limit}
    return arms.outcome({f"{name}.{direction}": time for name, time in times.items()}, data)


def cut(kept: int, walked: int, asked: dict[str, Any]) -> Tiles:
    """Tiles of these heights, the rest as the study says."""
    return Tiles(kept=kept, walked=walked, warps=WARPS[kept], stages=asked["stages"])


def described(tiles: Tiles) -> dict[str, int | bool]:
    """The numbers of a cut."""
    return {
        "kept": tiles.kept,
        "walked": tiles.walked,
        "warps": tiles.warps,
        "stages": tiles.stages,
        "specialised": tiles.specialised,
    }


class Run:
    """One direction of one problem, to be launched with any tiles."""

    def __init__(self, shape: Shape, direction: Direction, device: torch.device, seed: int) -> None:
        self._shape, self._direction, self._device = shape, direction, device
        problem = Problem(shape, device, seed)
        right = reference(*problem.inputs, problem.grad_o, is_causal=shape.is_causal)
        self._right = right[:1] if direction == "forward" else right[1:]
        self._q, self._k, self._v = (x.detach() for x in problem.inputs)
        self._grad_o = problem.grad_o
        self._scale = shape.head_dim**-0.5
        self._o, self._lse = launch.forward(
            self._q, self._k, self._v, is_causal=shape.is_causal, scale=self._scale
        )
        self._problem = KernelProblem.of(self._q, self._k, shape.is_causal)

    def call(self, tiles: Tiles) -> tuple[Tensor, ...]:
        """Output and log-sum-exp, or the three gradients."""
        how: dict[str, Any] = {
            "is_causal": self._shape.is_causal,
            "scale": self._scale,
            "tiles": tiles,
        }
        if self._direction == "forward":
            return launch.forward(self._q, self._k, self._v, **how)
        inputs = self._grad_o, self._q, self._k, self._v, self._o, self._lse
        return launch.backward(*inputs, **how)

    def prepare(self, tiles: Tiles) -> Callable[[], Callable[[], object]]:
        """What a turn of the race calls."""
        return lambda: lambda: self.call(tiles)

    def errors(self, tiles: Tiles) -> dict[str, float]:
        """How far the results of these tiles are off."""
        found = self.call(tiles)[: len(self._right)]
        names = NAMES[:1] if self._direction == "forward" else NAMES[1:]
        return errors(found, self._right, names)

    def by_count(self, tiles: Tiles) -> dict[str, int]:
        """Shared memory by count of the tiles."""
        return {"shared_by_count_bytes": shared_bytes(self._problem.case(self._direction), tiles)}

    def try_out(self, tiles: Tiles) -> dict[str, int | None]:
        """Compile and launch once; what the compiler made of it."""
        try:
            kernel = launch.launch_fitting(self._problem, self._direction, tiles, self._launch)
        except launch.TilesTooLarge as error:
            raise Unsupported(str(error)) from error
        return {
            "shared_bytes": getattr(getattr(kernel, "metadata", None), "shared", None),
            "registers": getattr(kernel, "n_regs", None),
            "spills": getattr(kernel, "n_spills", None),
        }

    def _launch(self, tiles: Tiles) -> Any:
        p, q, k, v = self._problem, self._q, self._k, self._v
        if self._direction == "forward":
            o, lse = torch.empty_like(self._o), torch.empty_like(self._lse)
            return launch.launch_forward(p, q, k, v, o, lse, self._scale, tiles)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return launch.launch_backward(
            p, self._grad_o, q, k, v, self._o, self._lse, grads, self._scale, tiles
        )

    def chosen(self) -> Tiles:
        """The tiles that are taken when nobody asks for others."""
        limit = processor(self._device).shared_limit
        return choose(self._problem.case(self._direction), limit)[0]
