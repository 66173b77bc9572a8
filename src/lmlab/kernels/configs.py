"""Tile shapes and launch options: looked up by GPU, shape and type, and reduced until they fit.

M counts query rows and N key rows, as in the FlashAttention papers. The forward keeps BLOCK_M
queries resident in a program and streams BLOCK_N keys per iteration. The backward's dK/dV pass does
the reverse: BLOCK_N keys are resident and BLOCK_M queries streamed. Its dQ pass, where there is
one, uses the same tile transposed (BLOCK_N queries resident, BLOCK_M keys streamed).

Larger tiles read less memory per product, until registers spill or shared memory runs out. The best
shape depends on head dimension, type, mask and GPU, and for short problems on the number of
programs. It is measured (`lmlab.kernels.tune`), recorded (`tile_sizes`) and looked up by these, the
direction, the length of a program's loop and the number of query blocks per SM.

The tiles are then checked against the shared memory of the actual device, which differs within an
architecture (163 KiB on an A100, 99 KiB on an RTX 3090), and reduced until they fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil, log2
from typing import Any, Literal

from torch import distributed

from lmlab.kernels.problem import SMALLEST_TILE, Direction, Problem, ceil_div, power_of_two
from lmlab.kernels.tile_sizes import TABLE

Fp32Dot = Literal["ieee", "tf32x3", "bf16x6"]

UNBOUNDED = 2**62
"""The bound of a table row that says "any"."""
RELATIVE_TIME = {128: 1.0, 192: 1.25}
"""Time of a warp-specialized forward tile by its query rows, measured with 128 keys per block."""
BF16_TERMS = 3
"""bf16 numbers that hold the digits of one fp32 number (`lmlab.kernels.fp32_terms`)."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile shape and options of one launch."""

    block_m: int
    """Query rows of a tile: resident in the forward, streamed in the backward's dK/dV pass."""
    block_n: int
    """Key rows of a tile: streamed in the forward, resident in the backward's dK/dV pass."""
    warps: int
    stages: int
    """Streamed tiles in flight."""
    tma: bool = False
    """Load streamed tiles by TMA instead of per-thread loads."""
    paired: bool = True
    """Backward: each program does a key tile and then a query tile."""
    programs_per_sm: int = 1
    """Warp-specialized forward: 2 for twice as many consumers, with half of the registers."""
    splits: int = 0
    """Programs that share the loop of one tile; 0 means as many as fill the GPU. Backward only
    where the dK/dV and dQ passes are separate programs."""
    warp_specialized: bool = False
    """The Hopper kernels for 16-bit types: 64 resident rows per consumer warpgroup."""
    fused: bool = False
    """Warp-specialized backward up to head dimension 64: one pass for all gradients."""
    rotated: bool = False
    """Fused, without a mask: the programs of a head start at different query blocks."""
    inline_delta: bool = False
    """Backward: compute delta in each program instead of a launch before; pays where the launch
    costs more than reading O again."""
    fp32_dot: Fp32Dot = "ieee"
    """How fp32 is multiplied: plain fp32, three TF32 products with the same accuracy or, backward
    only, six products of bf16 terms."""

    @property
    def terms(self) -> int:
        """Terms per input number."""
        return BF16_TERMS if self.fp32_dot == "bf16x6" else 1

    def rows(self, direction: Direction) -> tuple[int, int]:
        """Rows that a program keeps resident, and rows that it streams per iteration."""
        return orient(direction, self.block_m, self.block_n)

    def with_rows(self, direction: Direction, resident: int, streamed: int) -> Tiles:
        """The same options with another shape."""
        block_m, block_n = orient(direction, resident, streamed)
        return replace(self, block_m=block_m, block_n=block_n)

    def portable(self, problem: Problem) -> Tiles:
        """Power-of-two tiles for the portable kernels, where warp-specialized ones cannot run."""
        block_m, block_n = 1 << (self.block_m.bit_length() - 1), self.block_n
        if problem.direction == "backward" and problem.head_dim > 128:
            block_m, block_n = 32, 64  # larger ones spill
        # Two stages suit the fused backward; the portable kernel spills with them.
        stages = 3 if self.fused else self.stages
        return replace(
            self, block_m=block_m, block_n=block_n, stages=stages, tma=True, programs_per_sm=1,
            warp_specialized=False, fused=False, rotated=False,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages"


def orient(direction: Direction, a: int, b: int) -> tuple[int, int]:
    """Convert (BLOCK_M, BLOCK_N) to (resident, streamed) rows, or back."""
    return (a, b) if direction == "forward" else (b, a)


def q_slots(columns: int) -> int:
    """Q buffers per consumer of the warp-specialized forward: two if the next tile fits too."""
    return 2 if columns <= 192 else 1


def dq_block_n(tiles: Tiles, head_dim: int, sequence: int) -> int:
    """Keys that the dQ pass of the warp-specialized backward streams per iteration.

    Twice as many as the dK/dV pass streams queries, where registers allow and the loop is long:
    larger products read less shared memory. In a short loop they would cost more at the diagonal.
    """
    is_long = sequence > 1024 and head_dim <= 128 and tiles.stages == 2
    return 2 * tiles.block_m if is_long else tiles.block_m


def can_rotate(problem: Problem) -> bool:
    """Whether the programs of a head may start at different query blocks in the fused backward.

    They wait for each other, so all must run at once, next to no other kernel that waits, such as
    a collective. Two blocks each to start with are enough: they signal every second iteration.
    """
    programs, blocks = ceil_div(problem.keys, 128), ceil_div(problem.queries, 64)
    fits = programs <= problem.gpu.num_sms and abs(blocks - 2 * programs) <= 1
    return fits and not problem.is_causal and problem.group_size == 1 and not has_ranks()


def has_ranks() -> bool:
    """Whether this process belongs to a process group."""
    return distributed.is_available() and distributed.is_initialized()


def shared_bytes(problem: Problem, tiles: Tiles) -> int:
    """Estimated shared memory of a launch: the size of its tiles.

    An upper bound for the tiles of the table. The compiler may need more for bf16 terms in small
    tiles or on Blackwell; such a launch fails and the next smaller tiles are tried.
    """
    resident, streamed = tiles.rows(problem.direction)
    bits = tiles.terms * 16 if tiles.terms > 1 else problem.bits
    has_passes = tiles.warp_specialized and problem.direction == "backward" and not tiles.fused
    is_wide = problem.head_dim > 128 and tiles.warp_specialized
    if has_passes:
        streamed = dq_block_n(tiles, problem.head_dim, problem.sequence)
    columns = -(-problem.head_dim // 64) * 64 if is_wide else power_of_two(problem.head_dim)
    row = columns * bits // 8
    resident_tensors, row_stats = (1, 0) if problem.direction == "forward" else (2, 8)
    # tf32x3 keeps two copies of each resident tile: leading and trailing digits.
    copies = 2 if problem.bits == 32 and tiles.fp32_dot == "tf32x3" else 1
    if problem.direction == "forward" and tiles.warp_specialized:
        copies = q_slots(columns)
    total = resident_tensors * copies * resident * row
    total += tiles.stages * streamed * (2 * row + row_stats)
    if tiles.inline_delta:
        total += (tiles.stages - 1) * streamed * row  # O, needed one iteration later than dO
    if tiles.fused:
        total += 3 * resident * streamed * problem.bits // 8  # dS of up to three iterations
    if is_wide and has_passes:
        total += 4 * 64 * 64  # P, in fp32
    if problem.gpu.architecture == "blackwell":
        # P and dS reach the tensor cores through shared memory, and results return through it.
        total += resident_tensors * resident * max(streamed * problem.bits // 8, row)
    return tiles.programs_per_sm * (total + 2048)  # barriers, and alignment of each tile


def choose(problem: Problem) -> list[Tiles]:
    """Tiles whose estimated shared memory fits, best first, each smaller than the one before."""
    shared_limit = problem.gpu.shared_limit
    candidates = _shrink(problem, look_up(problem))
    fitting = [tiles for tiles in candidates if shared_bytes(problem, tiles) <= shared_limit]
    if not fitting:
        raise ValueError(
            f"flash: head_dim {problem.head_dim} in {problem.bits} bit does not fit the"
            f" {shared_limit // 1024} KiB of shared memory of this GPU with any tile"
        )
    return fitting


def _shrink(problem: Problem, tiles: Tiles) -> Iterator[Tiles]:
    """Ever smaller tiles: first with fewer stages, which keeps products fast, then fewer rows."""
    direction = problem.direction
    while True:
        yield tiles
        resident, streamed = tiles.rows(direction)
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.warp_specialized:
            tiles = tiles.portable(problem)
            tiles = tiles.with_rows(direction, tiles.rows(direction)[0], streamed // 2)
        elif streamed > SMALLEST_TILE and streamed >= resident // 2:
            tiles = tiles.with_rows(direction, resident, streamed // 2)
        elif resident > SMALLEST_TILE:
            tiles = tiles.with_rows(direction, resident // 2, streamed)
            tiles = replace(tiles, warps=4 if resident <= 64 else tiles.warps)
        elif tiles.stages > 1:
            tiles = replace(tiles, stages=1)
        elif tiles.fp32_dot != "ieee":
            tiles = replace(tiles, fp32_dot="ieee")
        else:
            return


def look_up(problem: Problem) -> Tiles:
    """The tiles of the first table row that covers the problem."""
    for row in rows():
        if row.covers(problem):
            return _with_least_tail(problem, row.tiles)
    raise LookupError(f"tile_sizes: no row covers {problem}")


def _with_least_tail(problem: Problem, tiles: Tiles) -> Tiles:
    """Two or three consumers, if the others than the table's leave clearly fewer SMs idle: without
    a mask, the time of the persistent forward is a number of whole waves."""
    is_long = problem.sequence > 512 and problem.head_dim <= 64
    is_alone = tiles.warp_specialized and tiles.programs_per_sm == 1
    if problem.is_causal or problem.direction == "backward" or not (is_alone and is_long):
        return tiles
    times = {}
    for block_m, time in RELATIVE_TIME.items():
        items = ceil_div(problem.queries, block_m) * problem.batch_heads
        times[block_m] = ceil_div(items, problem.gpu.num_sms) * time
    best = min(times, key=lambda block_m: times[block_m])
    return replace(tiles, block_m=best) if times[best] < 0.95 * times[tiles.block_m] else tiles


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    architectures: tuple[str, ...]
    direction: Direction
    bits: int
    head_dim: int
    masks: tuple[bool, ...]
    sequence: int
    blocks_per_sm: float
    tiles: Tiles
    whole_only: bool

    def covers(self, problem: Problem) -> bool:
        """Whether the row applies to the problem."""
        return (
            problem.gpu.architecture in self.architectures
            and (problem.direction, problem.bits) == (self.direction, self.bits)
            and problem.is_causal in self.masks
            and problem.head_dim <= self.head_dim
            and problem.sequence <= self.sequence
            and problem.blocks_per_sm <= self.blocks_per_sm
            and (problem.is_whole or not self.whole_only)
            and (not self.tiles.rotated or can_rotate(problem))
        )


@cache
def rows() -> tuple[Row, ...]:
    """The parsed table."""
    return tuple(_parse(line) for line in TABLE.splitlines() if line and not line.startswith("#"))


WHOLE = "whole"
_MASKS = {"causal": (True,), "full": (False,), "any": (True, False)}
_OPTIONS: dict[str, tuple[str, Any]] = {
    "tma": ("tma", True),
    "unpaired": ("paired", False),
    "two-per-sm": ("programs_per_sm", 2),
    "warp-specialized": ("warp_specialized", True),
    "fused": ("fused", True),
    "rotated": ("rotated", True),
    "inline-delta": ("inline_delta", True),
    "tf32x3": ("fp32_dot", "tf32x3"),
    "bf16x6": ("fp32_dot", "bf16x6"),
}
"""Maps an option of the table to a field of `Tiles` and its value."""


def _parse(line: str) -> Row:
    architectures, direction, bits, head_dim, mask, sequence, count, *choice = line.split()
    block_m, block_n, warps, stages = map(int, choice[:4])
    options: dict[str, Any] = dict(_OPTIONS[word] for word in choice[4:] if word != WHOLE)
    return Row(
        architectures=tuple(architectures.split(",")),
        direction="forward" if direction == "forward" else "backward",
        bits=int(bits),
        head_dim=int(head_dim),
        masks=_MASKS[mask],
        sequence=UNBOUNDED if sequence == "any" else int(sequence),
        blocks_per_sm=UNBOUNDED if count == "any" else float(Fraction(count)),
        tiles=Tiles(block_m=block_m, block_n=block_n, warps=warps, stages=stages, **options),
        whole_only=WHOLE in choice,
    )


def format_row(problem: Problem, tiles: Tiles) -> str:
    """The row that gives these tiles to problems up to this size, rounded up to powers of two."""
    options = [word for word, (name, value) in _OPTIONS.items() if getattr(tiles, name) == value]
    mask = "causal" if problem.is_causal else "full"
    head_dim, sequence = power_of_two(problem.head_dim), power_of_two(problem.sequence)
    blocks = Fraction(2.0 ** ceil(log2(problem.blocks_per_sm)))
    return (
        f"{problem.gpu.architecture:<9} {problem.direction:<9} {problem.bits} {head_dim:>3}"
        f" {mask:<6} {sequence:>5} {blocks!s:>4} {tiles.block_m:>4}"
        f" {tiles.block_n:>4} {tiles.warps:>2} {tiles.stages:>2}  {' '.join(options)}"
    ).rstrip()
