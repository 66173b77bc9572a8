"""A Hopper warpgroup: four consecutive warps that issue one tensor-core instruction (wgmma).

wgmma takes 64 rows of the left operand from registers or shared memory, the right from the latter.

Gluon shapes are powers of two. To pad less, tiles of head dimensions above 128 and, where it pays,
of 65 to 96 consist of CHUNKS chunks of CHUNK columns, loaded and multiplied one by one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code=assignment

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from lmlab.kernels.tile_ops import key_range

# Older versions of Triton have longer names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

WG_ROWS = gl.constexpr(64)
"""Rows of the left operand of one warpgroup."""


@dataclass(frozen=True)
class Shape:
    """The compile-time sizes and options of a kernel, one argument for all its functions."""

    CONSUMERS: Any
    """Warpgroups with 64 resident rows each."""
    BLOCK: Any
    """Streamed rows: BLOCK_N keys in the forward and for dQ, BLOCK_M queries for dK and dV."""
    CHUNK: Any
    CHUNKS: Any
    STAGES: Any
    """Streamed blocks in flight."""
    IS_CAUSAL: Any
    PINGPONG: Any = False
    """Forward: consumers take turns issuing products."""
    SLOTS: Any = 1
    """Forward: buffers of Q per consumer."""
    HAS_MASK: Any = True
    """Forward and dQ: whether any key block has a mask."""
    REGISTERS: Any = 240
    """Forward: per thread of one of two consumers."""
    DS_STAGES: Any = 0
    """Fused backward: iterations by which dS may be ahead of dQ."""
    ROTATED: Any = False
    """Fused backward: the programs of a head start at different query blocks, spread evenly."""
    HEAD_DIM: Any = 0
    RAGGED_KEYS: Any = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, gl.constexpr(value))

    @property
    def S_LAYOUT(self) -> Any:
        """Of a product of 64 resident and BLOCK streamed rows."""
        return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.BLOCK.value, 16]))

    @property
    def O_LAYOUT(self) -> Any:
        """Of a chunk of an accumulator."""
        return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.CHUNK.value, 16]))


@gluon.jit
def alloc_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers for a ring of COUNT buffers; a phase completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def key_blocks(start, queries, keys, ROWS: gl.constexpr, SHAPE: gl.constexpr):
    """For ROWS queries from `start`: the number of key blocks that need no mask, and of all."""
    unmasked, end = key_range(start, queries, keys, ROWS, SHAPE.BLOCK, SHAPE.IS_CAUSAL)
    return unmasked // SHAPE.BLOCK, (end + SHAPE.BLOCK - 1) // SHAPE.BLOCK


@gluon.jit
def key_mask(offs_m, block, keys, shift, SHAPE: gl.constexpr):
    """True for the keys of a block that a query attends to. The last query's future begins past
    the last key, so the causal comparison also excludes keys past the end."""
    offs_n = gl.arange(0, SHAPE.BLOCK, gl.SliceLayout(0, SHAPE.S_LAYOUT))
    if SHAPE.IS_CAUSAL:
        mask = offs_n[None, :] <= (offs_m + shift - block * SHAPE.BLOCK)[:, None]
    else:
        mask = (offs_n < keys - block * SHAPE.BLOCK)[None, :]
    return mask


@gluon.jit
def begin_tma_store(tile, target, staging, batch, head, start, chunk, SHAPE: gl.constexpr):
    """Start storing 64 rows of a result by TMA, which clips them to the tensor.

    `staging` is shared memory that no other warpgroup uses any more. Storing from registers instead
    would write 16 bytes of a row at a time, half a sector.
    """
    staging.reshape([WG_ROWS, SHAPE.CHUNK]).store(tile.to(target.dtype))
    fence_async_shared()
    async_store(target, [batch, head, start, chunk * SHAPE.CHUNK], staging)


@gluon.jit
def load_chunks(source, corner, barrier, tiles, index, SHAPE: gl.constexpr):
    """Load tile `index` by TMA, chunk by chunk."""
    batch, head, start = corner
    for chunk in gl.static_range(SHAPE.CHUNKS):
        place = [batch, head, start, chunk * SHAPE.CHUNK]
        async_load(source, place, barrier, tiles.index(index * SHAPE.CHUNKS + chunk))


@gluon.jit
def start_scores(resident, wg, streamed, stage, SHAPE: gl.constexpr):
    """Issue the product of a resident and a streamed tile: S or dP."""
    scores = gl.zeros([WG_ROWS, SHAPE.BLOCK], gl.float32, SHAPE.S_LAYOUT)
    for chunk in gl.static_range(SHAPE.CHUNKS):
        rows = resident.index(wg * SHAPE.CHUNKS + chunk).reshape([WG_ROWS, SHAPE.CHUNK])
        columns = streamed.index(stage * SHAPE.CHUNKS + chunk).reshape([SHAPE.BLOCK, SHAPE.CHUNK])
        columns = columns.permute((1, 0))
        scores = warpgroup_mma(rows, columns, scores, use_acc=chunk > 0, is_async=True)
    return scores


@gluon.jit
def start_product(operand, streamed, stage, acc, SHAPE: gl.constexpr):
    """Issue the product of P or dS (`operand`) and a streamed tile, added to an accumulator."""
    total = ()
    for chunk in gl.static_range(SHAPE.CHUNKS):
        columns = streamed.index(stage * SHAPE.CHUNKS + chunk).reshape([SHAPE.BLOCK, SHAPE.CHUNK])
        total += (warpgroup_mma(operand, columns, acc[chunk], is_async=True),)
    return total


@gluon.jit
def zero_chunks(SHAPE: gl.constexpr):
    """A zeroed accumulator of 64 rows, in chunks."""
    return (gl.zeros([WG_ROWS, SHAPE.CHUNK], gl.float32, SHAPE.O_LAYOUT),) * SHAPE.CHUNKS
