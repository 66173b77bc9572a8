"""How a kernel is cut into tiles and warps: chosen by GPU, shape and type, always one that fits.

Two tiles decide. A program keeps one tile in registers and shared memory (`kept` rows) and walks
past it with tiles of `walked` rows, of which `stages` are on their way at a time. Larger tiles read
less memory for each product; they also take registers until these spill, and shared memory until
nothing else fits beside them. Where the best lies depends on the head dimension, the type, the mask
and the GPU, and for short problems on how many programs there are at all. So it is measured
(`lmlab.kernels.tune`) and written down (`launch_table`), and looked up by

- architecture, direction, bits of the type, head dimension (the next power of two), mask,
- the longer sequence and the rows of the whole problem (batch x heads x queries), each up to a
  bound: the first sequence seen must not decide for all, nor one head for sixteen.

A chosen cut is held against the shared memory of the very device, which differs inside one
architecture (163 KiB on an A100, 99 KiB on an RTX 3090), and made smaller until it fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lmlab.kernels.launch_table import TABLE

Direction = Literal["forward", "backward"]
Products = Literal["ieee", "tf32x3", "bf16x6"]

ANY = 2**62
"""The bound of a row that has none."""

PARTS = 3
"""bf16 numbers that hold the digits of one of fp32 (`lmlab.kernels.parts`)."""

SMALLEST_TILE = 16
"""A product on tensor cores needs 16 rows."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One way to launch a kernel."""

    kept: int
    """Rows of the tile that a program keeps: queries forward, keys and queries backward."""
    walked: int
    """Rows of the tiles that it walks."""
    warps: int
    stages: int
    """Walked tiles that are loaded ahead."""
    descriptors: bool = False
    """Walked tiles come through the copy engine (TMA) instead of each thread's own loads."""
    paired: bool = True
    """Backward: one program does a tile of keys and then a tile of queries."""
    persistent: bool = False
    """Forward: as many programs as the GPU holds, each doing one tile after the other."""
    splits: int = 0
    """Programs that share the walk of one tile; 0 means as many as fill the GPU. Backward only
    where keys and queries are programs of their own."""
    specialised: bool = False
    """Hopper, 16 bit: kernels whose warps load or compute, 64 kept rows for each that computes."""
    once: bool = False
    """Specialised backward at head dimensions 64 and 128: one walk for all, dQ added in order."""
    own_delta: bool = False
    """Backward: programs make D by themselves instead of reading what a launch before them made;
    short sequences feel the launch more than the reading of O."""
    products: Products = "ieee"
    """fp32 only: plain fp32 products, or three TF32 products that add up to the same digits, or,
    backward, six products of numbers that were cut into bf16 parts before."""

    @property
    def parts(self) -> int:
        """Into how many parts a number of the inputs is cut."""
        return PARTS if self.products == "bf16x6" else 1

    def plain(self) -> Tiles:
        """For the kernels that run where the specialised ones cannot: powers of two."""
        kept = 1 << (self.kept.bit_length() - 1)
        # Two stages suit one walk at head dimension 128; a plain kernel of these tiles spills then.
        stages = 3 if self.once else self.stages
        return replace(
            self, kept=kept, stages=stages, descriptors=True, specialised=False, once=False
        )

    def __str__(self) -> str:
        return f"{self.kept} x {self.walked}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a choice depends on."""

    direction: Direction
    architecture: str
    bits: int
    """Bits of the type of the inputs, 16 or 32."""
    head_dim: int
    is_causal: bool
    sequence: int
    """The longer of queries and keys."""
    rows: int
    """batch x heads x queries."""

    def bucket(self) -> Case:
        """The case that stands for all of about this size: bounds rounded up to powers of two."""
        return replace(
            self,
            head_dim=power_of_two(self.head_dim),
            sequence=power_of_two(self.sequence),
            rows=power_of_two(self.rows),
        )


def power_of_two(number: int) -> int:
    """The next power of two, at least the smallest tile."""
    return max(SMALLEST_TILE, 1 << (number - 1).bit_length())


def architecture(major: int, minor: int) -> str | None:
    """Name of the architecture of a compute capability; None for those before Ampere."""
    if major >= 10:
        return "blackwell"
    if major == 9:
        return "hopper"
    if (major, minor) == (8, 9):
        return "ada"
    return "ampere" if major == 8 else None


def shared_bytes(case: Case, tiles: Tiles) -> int:
    """Shared memory that a launch takes, by count of its tiles.

    For the cuts of the table the compiler takes no more. What it needs besides tiles differs: parts
    in small cuts, or on Blackwell, take more than counted here, which shows when they are launched.
    """
    bits = tiles.parts * 16 if tiles.parts > 1 else case.bits
    row = power_of_two(case.head_dim) * bits // 8
    kept_tensors, row_sums = (1, 0) if case.direction == "forward" else (2, 8)
    # With three products each kept tile is there twice, its leading and its trailing digits.
    copies = 2 if case.bits == 32 and tiles.products == "tf32x3" else 1
    total = kept_tensors * copies * tiles.kept * row
    total += tiles.stages * tiles.walked * (2 * row + row_sums)
    if tiles.own_delta:
        total += (tiles.stages - 1) * tiles.walked * row  # O, needed a turn later than the rest
    if tiles.once:
        total += 3 * tiles.kept * tiles.walked * case.bits // 8  # dS of up to three turns
    if case.architecture == "blackwell":
        # Weights reach its tensor cores through shared memory, and results come back through it.
        total += kept_tensors * tiles.kept * max(tiles.walked * case.bits // 8, row)
    return total + 2048  # barriers, and alignment of each tile


def choose(case: Case, shared_limit: int) -> list[Tiles]:
    """Cuts for a case, the best first; each one fits by count, each smaller than the one before."""
    cuts = smaller_and_smaller(look_up(case))
    fitting = [tiles for tiles in cuts if shared_bytes(case, tiles) <= shared_limit]
    if not fitting:
        raise ValueError(
            f"flash: head_dim {case.head_dim} in {case.bits} bit does not fit the"
            f" {shared_limit // 1024} KiB of shared memory of this GPU with any tile"
        )
    return fitting


def smaller_and_smaller(tiles: Tiles) -> Iterator[Tiles]:
    """First fewer stages, which cost no speed in the products; then smaller tiles."""
    while True:
        yield tiles
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.specialised:
            tiles = replace(tiles.plain(), walked=tiles.walked // 2)
        elif tiles.walked > SMALLEST_TILE and tiles.walked >= tiles.kept // 2:
            tiles = replace(tiles, walked=tiles.walked // 2)
        elif tiles.kept > SMALLEST_TILE:
            warps = 4 if tiles.kept <= 64 else tiles.warps
            tiles = replace(tiles, kept=tiles.kept // 2, warps=warps)
        elif tiles.stages > 1:
            tiles = replace(tiles, stages=1)
        elif tiles.products != "ieee":
            tiles = replace(tiles, products="ieee")
        else:
            return


def look_up(case: Case) -> Tiles:
    """The table's choice for a case: the first of its rows whose bounds are not exceeded."""
    case = case.bucket()
    for row in rows():
        if row.covers(case):
            return row.tiles
    raise LookupError(f"launch_table: no row covers {case}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    architectures: tuple[str, ...]
    direction: Direction
    bits: int
    head_dim: int
    masks: tuple[bool, ...]
    sequence: int
    rows: int
    tiles: Tiles

    def covers(self, case: Case) -> bool:
        """Whether the case is one of those that the line speaks of."""
        return (
            case.architecture in self.architectures
            and case.direction == self.direction
            and case.bits == self.bits
            and case.head_dim <= self.head_dim
            and case.is_causal in self.masks
            and case.sequence <= self.sequence
            and case.rows <= self.rows
        )


@cache
def rows() -> tuple[Row, ...]:
    """The table, line by line."""
    return tuple(_row(line) for line in TABLE.splitlines() if line and not line.startswith("#"))


def _row(line: str) -> Row:
    architectures, direction, bits, head_dim, mask, sequence, count, *cut = line.split()
    kept, walked, warps, stages = (int(number) for number in cut[:4])
    words = cut[4:]
    return Row(
        architectures=tuple(architectures.split(",")),
        direction="forward" if direction == "forward" else "backward",
        bits=int(bits),
        head_dim=int(head_dim),
        masks={"causal": (True,), "full": (False,), "any": (True, False)}[mask],
        sequence=ANY if sequence == "any" else int(sequence),
        rows=ANY if count == "any" else int(count),
        tiles=Tiles(
            kept=kept,
            walked=walked,
            warps=warps,
            stages=stages,
            descriptors="descriptors" in words,
            paired="apart" not in words,
            persistent="persistent" in words,
            specialised="specialised" in words,
            once="once" in words,
            own_delta="own-delta" in words,
            products=_products(words),
        ),
    )


def _products(words: list[str]) -> Products:
    if "bf16x6" in words:
        return "bf16x6"
    return "tf32x3" if "tf32x3" in words else "ieee"


def line_of(case: Case, tiles: Tiles) -> str:
    """The line of the table that says: for cases up to this one, these tiles."""
    words = [
        word
        for word, holds in (
            ("descriptors", tiles.descriptors),
            ("apart", not tiles.paired),
            ("persistent", tiles.persistent),
            ("specialised", tiles.specialised),
            ("once", tiles.once),
            ("own-delta", tiles.own_delta),
            ("tf32x3", tiles.products == "tf32x3"),
            ("bf16x6", tiles.products == "bf16x6"),
        )
        if holds
    ]
    mask = "causal" if case.is_causal else "full"
    return (
        f"{case.architecture:<9} {case.direction:<9} {case.bits} {case.head_dim:>4} {mask:<7}"
        f"{case.sequence:>6} {case.rows:>8} {tiles.kept:>6} {tiles.walked:>4} {tiles.warps:>3}"
        f" {tiles.stages:>2}  {' '.join(words)}"
    ).rstrip()
