"""Our kernels with different tile shapes: time and shared memory.

BLOCK_M counts query rows and BLOCK_N key rows. The forward keeps BLOCK_M queries resident and
streams BLOCK_N keys; the backward keeps BLOCK_N keys and streams BLOCK_M queries. Larger tiles read
less memory per product, until registers spill or shared memory runs out. Every shape is a variant:
checked against the reference and timed in alternation with the others, or reported with the reason
why the GPU cannot run it. Shared memory is given as estimated and as compiled.

`data`: `flops`, `shared_limit_bytes` and `arms`, named BLOCK_MxBLOCK_N, and `chosen` for the tiles
of the launch table. Each has `block_m`, `block_n`, `warps`, `stages`, `specialised`,
`errors`, `shared_by_count_bytes`, and `shared_bytes`, `registers`, `spills` as the compiled kernel
says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.problem import Problem, Shape, shape_of
from lmlab.chapters.attention.measure.race import judge, patience_of
from lmlab.chapters.attention.measure.reference import NAMES, errors, reference
from lmlab.chapters.attention.measure.variants import Arms, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels import launch
from lmlab.kernels.configs import Direction, Tiles, choose, orient, shared_bytes
from lmlab.kernels.problem import Problem as KernelProblem
from lmlab.kernels.problem import device_info
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.race import measure_in_rounds
from lmlab.study.points import Point

CHOSEN = "chosen"
OURS = "flash"
WARPS = {16: 4, 32: 4, 64: 4, 128: 8, 256: 8}
"""By resident rows: four warps up to 64, eight for more."""


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
        cuts = {f"{m}x{n}": cut(m, n, asked) for m, n in settings["tiles"]}
        cuts[CHOSEN] = run.chosen()
        arms = Arms(cuts, device)
        for name, tiles in cuts.items():
            with arms.attempt(name):
                arms.note(name, **described(tiles), **run.by_count(tiles))
                arms.note(name, **run.try_out(tiles))
                judge(name, run.errors(tiles), arms, shape.dtype)
        calls = {name: run.prepare(cuts[name]) for name in arms.running}
        times, broken = measure_in_rounds(calls, device=device, patience=patience_of(settings))
        for name, error in broken.items():
            arms.stop(name, error)
    data = {"flops": shape.flops(), "shared_limit_bytes": device_info(device).shared_limit}
    return arms.outcome({f"{name}.{direction}": time for name, time in times.items()}, data)


def cut(block_m: int, block_n: int, asked: dict[str, Any]) -> Tiles:
    """Tiles of this shape, the rest as the study says."""
    resident, _ = orient(asked["direction"], block_m, block_n)
    return Tiles(block_m=block_m, block_n=block_n, warps=WARPS[resident], stages=asked["stages"])


def described(tiles: Tiles) -> dict[str, int | bool]:
    """The numbers of a cut."""
    return {
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "warps": tiles.warps,
        "stages": tiles.stages,
        "specialised": tiles.warp_specialized,
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
        qkv = self._q, self._k, self._v
        if self._direction == "forward":
            outputs = torch.empty_like(self._o), torch.empty_like(self._lse)
            return launch.launch_forward(self._problem, qkv, outputs, self._scale, tiles)
        inputs = self._grad_o, *qkv, self._o, self._lse
        grads = tuple(map(torch.empty_like, qkv))
        return launch.launch_backward(self._problem, inputs, grads, self._scale, tiles)

    def chosen(self) -> Tiles:
        """The tiles that are taken when nobody asks for others."""
        limit = device_info(self._device).shared_limit
        return choose(self._problem.case(self._direction), limit)[0]
