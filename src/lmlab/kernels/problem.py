"""One attention problem and the device that it runs on: all that a launch needs except tensors.

What follows from shapes alone is computed once a shape and remembered, because on a short sequence
the host is slower than the GPU.

**Sections.** Programs start in an order that keeps the keys and values in use within half of the L2
(`abreast` heads at a time); the other half is left to the tiles that are written.

**Splits.** A single head of a few thousand queries has fewer tiles than a large GPU has processors.
What each tile walks (keys, backward also queries) is then divided among programs until the GPU is
about filled twice, as long as each still walks a few tiles: joining the parts has its price too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from lmlab.kernels.configs import (
    Case,
    Direction,
    Tiles,
    architecture,
    power_of_two,
    shared_bytes,
)

SPLITS_AT_MOST = 16
TILES_PER_SPLIT_AT_LEAST = 4
"""Forward; backward does twice as much at a tile and has two."""
WARPS_RESIDENT = 16
"""Warps of these kernels whose registers fit one processor, for a grid of persistent programs."""


class UnsupportedDevice(ValueError):
    """A device that the kernels do not run on."""


@dataclass(frozen=True)
class Processor:
    """What a launch must know of a device."""

    architecture: str
    count: int
    """Streaming multiprocessors."""
    shared_limit: int
    """Shared memory that one program may have, in bytes."""
    l2_bytes: int


@cache
def processor(device: torch.device) -> Processor:
    """The facts of a device; a CPU is an interpreter with room for anything."""
    if device.type != "cuda":
        return Processor("cpu", 1, 2**30, 2**30)
    facts: Any = torch.cuda.get_device_properties(device)
    name = architecture(facts.major, facts.minor)
    if name is None:
        raise UnsupportedDevice(
            f"flash: {facts.name} has compute capability {facts.major}.{facts.minor},"
            " 8.0 or newer is needed"
        )
    return Processor(
        name, facts.multi_processor_count, facts.shared_memory_per_block_optin, facts.L2_cache_size
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Shapes, type and mask of one call.

    Remembered things are looked up by the problem several times a call, so it is compared and
    hashed as the object that it is; `of` gives equal calls the same one.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    is_causal: bool
    tf32: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool) -> Problem:
        """The problem that queries and keys of four dimensions pose."""
        batch, heads, queries, head_dim = q.shape
        tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        _, kv_heads, keys, _ = k.shape
        return _the_problem(
            q.device, q.dtype, batch, heads, kv_heads, queries, keys, head_dim, is_causal, tf32
        )

    @property
    def pairs(self) -> int:
        """Heads of all batches."""
        return self.batch * self.heads

    @property
    def kv_pairs(self) -> int:
        """Heads of keys and values of all batches."""
        return self.batch * self.kv_heads

    def case(self, direction: Direction) -> Case:
        """What the choice of tiles depends on."""
        return Case(
            direction=direction,
            architecture=processor(self.device).architecture,
            bits=8 * self.dtype.itemsize,
            head_dim=self.head_dim,
            is_causal=self.is_causal,
            sequence=max(self.queries, self.keys),
            rows=self.pairs * self.queries,
        )


@cache  # not bounded: one that was forgotten and made anew would be remembered elsewhere twice
def _the_problem(
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    is_causal: bool,
    tf32: bool,
) -> Problem:
    return Problem(
        device=device,
        dtype=dtype,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        is_causal=is_causal,
        tf32=tf32,
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """A launch without its tensors; remembered, so compared as the object that it is."""

    programs: int
    """Pieces of work; also the grid, unless programs are persistent."""
    grid: int
    abreast: int
    splits: int
    constants: dict[str, Any]
    """Compile-time arguments of the kernel and options of the launch."""


@lru_cache(maxsize=4096)
def forward_plan(problem: Problem, tiles: Tiles) -> Plan:
    """How to launch the forward kernel."""
    device = processor(problem.device)
    works = _ceil_div(problem.queries, tiles.kept) * problem.pairs
    walk = _ceil_div(problem.keys, tiles.walked) // TILES_PER_SPLIT_AT_LEAST
    splits = tiles.splits or _splits(works, walk, device.count)
    programs = works * splits
    resident = device.shared_limit // shared_bytes(problem.case("forward"), tiles)
    resident = max(1, min(resident, WARPS_RESIDENT // tiles.warps))
    return Plan(
        programs=programs,
        grid=min(programs, resident * device.count) if tiles.persistent else programs,
        abreast=_abreast(problem, 2) * (problem.heads // problem.kv_heads),
        splits=splits,
        constants={
            **_constants(problem, tiles),
            "SPLITS": splits,
            "PERSISTENT": tiles.persistent,
        },
    )


@lru_cache(maxsize=4096)
def backward_plan(problem: Problem, tiles: Tiles) -> Plan:
    """How to launch the backward kernel."""
    key_tiles = _ceil_div(problem.keys, tiles.kept)
    query_tiles = _ceil_div(problem.queries, tiles.kept)
    together = max(key_tiles, query_tiles) * problem.kv_pairs
    apart = key_tiles * problem.kv_pairs + query_tiles * problem.pairs
    # Pairs of tiles are even in length; halves are twice as many, which a small problem needs
    # more. Heads that share keys would make the halves of a pair uneven.
    paired = (
        tiles.paired
        and problem.heads == problem.kv_heads
        and together >= processor(problem.device).count
    )
    works = together if paired else apart
    splits = 1 if paired else tiles.splits or _backward_splits(problem, tiles, works)
    constants = {
        **_constants(problem, tiles),
        "PAIRED": paired,
        "PARTS": parts_of(problem, tiles),
        "SPLITS": splits,
        "OWN_DELTA": tiles.own_delta and parts_of(problem, tiles) == 1,
    }
    return Plan(works * splits, works * splits, _abreast(problem, 4), splits, constants)


def _backward_splits(problem: Problem, tiles: Tiles, works: int) -> int:
    walk = _ceil_div(max(problem.queries, problem.keys), tiles.walked)
    return _splits(works, 2 * walk // TILES_PER_SPLIT_AT_LEAST, processor(problem.device).count)


def parts_of(problem: Problem, tiles: Tiles) -> int:
    """Into how many parts numbers are cut; TF32, where it is asked for, needs no more than one."""
    return 1 if problem.tf32 else tiles.parts


def delta_rows(problem: Problem) -> int:
    """Rows that a program takes which passes over them once: 16 KiB of 16-bit numbers."""
    return 8192 // power_of_two(problem.head_dim)


@lru_cache(maxsize=4096)
def pass_constants(problem: Problem) -> dict[str, int]:
    """Compile-time arguments of a kernel that passes over all rows once."""
    return {
        "ROWS": delta_rows(problem),
        "BLOCK_D": power_of_two(problem.head_dim),
        "HEAD_DIM": problem.head_dim,
    }


def delta_grid(problem: Problem) -> int:
    """Programs of the delta kernel."""
    return _ceil_div(problem.queries, delta_rows(problem)) * problem.pairs


def split_grid(problem: Problem) -> tuple[int, int]:
    """Programs of the kernel that cuts numbers into parts: for queries and for keys, twice."""
    of_queries = _ceil_div(problem.queries, delta_rows(problem)) * problem.pairs
    of_keys = _ceil_div(problem.keys, delta_rows(problem)) * problem.kv_pairs
    return max(of_queries, of_keys), 4


def _constants(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    longer_tile = max(tiles.kept, tiles.walked)
    return {
        "KEPT": tiles.kept,
        "WALKED": tiles.walked,
        "BLOCK_D": power_of_two(problem.head_dim),
        "HEAD_DIM": problem.head_dim,
        "DESCRIPTOR": False,
        "IS_CAUSAL": problem.is_causal,
        "RAGGED_QUERIES": problem.queries % longer_tile != 0,
        "RAGGED_KEYS": problem.keys % longer_tile != 0,
        "PRECISION": _precision(problem, tiles),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _precision(problem: Problem, tiles: Tiles) -> str:
    """How fp32 operands are multiplied; parts are products of bf16, plain as such."""
    if problem.tf32:
        return "tf32"
    return "ieee" if tiles.parts > 1 else tiles.products


def _splits(works: int, at_most: int, processors: int) -> int:
    """Programs that share the walk of one tile: a power of two, to compile few variants."""
    wanted = min(2 * processors // works, at_most, SPLITS_AT_MOST)
    return 1 << (max(1, wanted).bit_length() - 1)


def _abreast(problem: Problem, tensors: int) -> int:
    """Heads of keys and values whose tensors fit half of the L2 together."""
    longer = max(problem.queries, problem.keys)
    one_head = tensors * longer * problem.head_dim * problem.dtype.itemsize
    fitting = processor(problem.device).l2_bytes // 2 // one_head
    return min(max(1, fitting), problem.kv_pairs)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
