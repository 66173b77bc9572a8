"""Our kernels with different tile sizes: time, shared memory, registers and spills.

A tile of scores has `block_m` rows of queries (M) and `block_n` rows of keys (N). Forward, a
program holds block_m queries and loops over tiles of keys. Backward, for dK and dV, it holds
block_n keys and loops over tiles of queries (for dQ the other way around). Larger tiles read less
memory per product, until registers spill or shared memory runs out. Every tile size is a variant;
`chosen` is the one that `kernels/tile_sizes.py` selects. A kernel is compiled for its tiles and
head dimension, not for a sequence length, so one job measures all sequences.

Records, all with the labels sequence, variant (BLOCK_MxBLOCK_N or chosen), block_m, block_n,
num_warps, num_stages and specialized (warps either load or compute): `time`, `error` per tensor,
`shared_memory`, `registers` and `spills` as compiled, `estimated_shared_memory` (by tile size).
Also `flops` per sequence and phase, and `shared_memory_limit`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lmlab.chapters.attention.measure import rounds
from lmlab.chapters.attention.measure.problem import NAMES, Problem, errors, shape_of
from lmlab.chapters.attention.measure.variants import Variants, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels import launch
from lmlab.kernels.configs import Tiles, choose, orient, shared_bytes
from lmlab.kernels.problem import Direction, device_info
from lmlab.kernels.problem import Problem as KernelProblem
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import precision_named, tf32_allowed
from lmlab.measure.records import Label, value
from lmlab.study.points import Point

CHOSEN = "chosen"
WARPS = {16: 4, 32: 4, 64: 4, 128: 8, 256: 8}
"""By the rows of the tile that a program holds."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the tile sizes of one direction and head dimension, sequence by sequence."""
    asked = {**point.settings, **point.parameters}
    dtype = precision_named(asked["precision"]).dtype
    refuse_unsupported(asked["attention"], device, dtype, asked["head_dim"])
    compared = [compare({**asked, "sequence": each}, device) for each in asked["sequences"]]
    if not any(variants.running for variants in compared):
        return compared[0].outcome()
    limit = value("shared_memory_limit", device_info(device).shared_limit, "B")
    return Outcome(measurements=[limit, *(r for each in compared for r in each.records)])


def compare(asked: Mapping[str, Any], device: torch.device) -> Variants:
    """Check and time every tile size at one sequence."""
    shape, direction = shape_of(asked), cast(Direction, asked["direction"])
    with tf32_allowed(shape.tf32), collector_paused():
        problem = Problem(shape, device, asked["seed"])
        kernel = Kernel(problem, direction)
        tiles = {
            f"{block_m}x{block_n}": tiles_of(block_m, block_n, direction, asked["stages"])
            for block_m, block_n in asked["tiles"]
        }
        tiles[CHOSEN] = choose(kernel.problem)[0]
        length = {"sequence": shape.sequence}
        variants = Variants({name: {**labels(t), **length} for name, t in tiles.items()}, device)
        variants.records += rounds.flop_records(problem, **length)
        for name, each in tiles.items():
            with variants.attempt(name):
                for quantity, number in kernel.resources(each):
                    unit = "B" if "memory" in quantity else ""
                    variants.note(name, quantity, number, unit)
                rounds.check_errors(variants, name, kernel.errors(each), shape.dtype)
        calls = {name: partial(kernel.prepare, tiles[name]) for name in variants.running}
        rounds.sample_in_turns(variants, calls, rounds.sampling_budget(asked))
    return variants


def tiles_of(block_m: int, block_n: int, direction: Direction, stages: int) -> Tiles:
    """Launch parameters for a tile size; the resident rows determine the number of warps."""
    held, _ = orient(direction, block_m, block_n)
    return Tiles(block_m=block_m, block_n=block_n, warps=WARPS[held], stages=stages)


def labels(tiles: Tiles) -> dict[str, Label]:
    """Launch parameters as labels."""
    return {
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "specialized": tiles.warp_specialized,
    }


class Kernel:
    """One direction of one problem, launched with any tiles."""

    def __init__(self, problem: Problem, direction: Direction) -> None:
        causal, scale = problem.shape.is_causal, problem.shape.head_dim**-0.5
        options: dict[str, Any] = {"is_causal": causal, "scale": scale}
        q, k, v = (x.detach() for x in problem.inputs)
        o, lse = launch.forward(q, k, v, **options)
        self.problem = KernelProblem.of(q, k, causal, direction)
        outputs = slice(0, 1)
        inputs: tuple[Tensor, ...] = q, k, v
        self._call: Callable[..., tuple[Tensor, ...]] = partial(launch.forward, *inputs, **options)
        if direction == "backward":
            inputs, outputs = (q, k, v, problem.grad_o, o, lse), slice(1, None)
            self._call = partial(launch.backward, problem.grad_o, q, k, v, o, lse, **options)
        self._names, self._expected = NAMES[outputs], problem.reference()[outputs]
        self._compiled = partial(launch.compiled_kernel, inputs, causal, scale)

    def prepare(self, tiles: Tiles) -> Callable[[], object]:
        """The call that is timed."""
        return partial(self._call, tiles=tiles)

    def errors(self, tiles: Tiles) -> dict[str, float]:
        """Relative errors with these tiles; the log-sum-exp is not compared."""
        found = self._call(tiles=tiles)[: len(self._names)]
        return errors(found, self._expected, self._names)

    def resources(self, tiles: Tiles) -> Iterator[tuple[str, int | None]]:
        """Yield estimated shared memory, then what the kernel uses; raise if it does not fit."""
        yield "estimated_shared_memory", shared_bytes(self.problem, tiles)
        try:
            self._call(tiles=tiles)
        except launch.TilesTooLarge as error:
            raise Unsupported(str(error)) from error
        kernel = self._compiled(tiles)
        yield "shared_memory", getattr(getattr(kernel, "metadata", None), "shared", None)
        yield "registers", getattr(kernel, "n_regs", None)
        yield "spills", getattr(kernel, "n_spills", None)
