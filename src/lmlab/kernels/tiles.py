"""What the attention kernels share: which tile a program works on, and how a tile comes and goes.

A tensor of attention is four-dimensional (batch, heads, rows, head_dim). A kernel sees it as a
pointer with three strides (the fourth is 1) or, where the GPU has a copy engine for tiles, as a
tensor descriptor. Offsets of a batch, a head and the first row of a tile are 64-bit, so tensors of
more than 2^31 elements are addressed rightly; offsets inside one tile are 32-bit, which takes half
the registers and cannot overflow for the strides that the host lets through.

A head dimension that is no power of two lies in a tile of the next one, the rest read as zeros: the
products are then the same numbers. The functions here are inlined into the kernels.
"""

# Parameters of a kernel are typed by Triton at every call, not by Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def place(program, tiles, pairs, heads, abreast, LAST_FIRST: tl.constexpr):
    """Tile, batch and head of a program, out of one number that counts up to 2^31.

    Programs start in the order of that number. All tiles of `abreast` heads come before the next
    heads, so that the keys and values in use together fit the L2. Among those heads tiles go from
    first to last, or with LAST_FIRST from last to first, whichever puts the longest walks at the
    beginning: a long walk that starts last leaves the other processors idle.
    """
    section = program // (abreast * tiles)
    inside = program - section * abreast * tiles
    width = tl.minimum(abreast, pairs - section * abreast)
    tile = inside // width
    pair = section * abreast + inside - tile * width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    batch = pair // heads
    return tile, batch.to(tl.int64), (pair - batch * heads).to(tl.int64)


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Rows `start` to `start + ROWS` of one head, zeros beyond `length` if BOUNDED.

    Without BOUNDED all rows must exist; a descriptor knows its bounds by itself.
    """
    if DESCRIPTOR:
        corner = [batch.to(tl.int32), head.to(tl.int32), start, 0]
        tile = source.load(corner).reshape(ROWS, BLOCK_D)
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        base = source + batch * strides[0] + head * strides[1] + start.to(tl.int64) * strides[2]
        pointers = base + rows[:, None] * strides[2] + columns[None, :]
        if BOUNDED:
            inside = (rows < length - start)[:, None] & (columns < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    target, strides, batch, head, start, length, tile,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write a tile to the rows of one head from `start` on, except what lies beyond the tensor."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    base = target + batch * strides[0] + head * strides[1] + start.to(tl.int64) * strides[2]
    pointers = base + rows[:, None] * strides[2] + columns[None, :]
    inside = (rows < length - start)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def share_of(first, last, split, WALKED: tl.constexpr, SPLITS: tl.constexpr):
    """The part of a walk that is one program's, whole tiles of it; none if they have run out."""
    share = (last - first + SPLITS * WALKED - 1) // (SPLITS * WALKED) * WALKED
    own = tl.minimum(first + split * share, last)
    return own, tl.minimum(own + share, last)


@triton.jit
def is_last(work, arrivals, SPLITS: tl.constexpr):
    """Whether all others that share a walk have left their part; the count then starts anew."""
    tl.debug_barrier()  # all threads have written before one of them says so
    complete = tl.atomic_add(arrivals + work, 1) == SPLITS - 1
    if complete:
        tl.store(arrivals + work, 0)
    return complete


@triton.jit
def leave_tile(tile, number, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile of sums where another program finds it, under a number."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    part = parts + tl.cast(number, tl.int64) * (ROWS * COLUMNS)
    tl.store(part + rows[:, None] * COLUMNS + columns[None, :], tile)


@triton.jit
def sum_of_tiles(
    first, step, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr
):
    """The sum of tiles that others left, in the order of their numbers.

    Other processors wrote them: `.cg` reads the L2, never an old line of this processor's L1.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for index in range(COUNT):
        part = parts + tl.cast(first + index * step, tl.int64) * (ROWS * COLUMNS)
        total += tl.load(part + rows[:, None] * COLUMNS + columns[None, :], cache_modifier=".cg")
    return total


@triton.jit
def load_row(source, start, length, beyond, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """One number for each of the queries `start` to `start + ROWS`, `beyond` after the last."""
    rows = tl.arange(0, ROWS)
    if BOUNDED:
        row = tl.load(source + start + rows, mask=rows < length - start, other=beyond)
    else:
        row = tl.load(source + start + rows)
    return row


@triton.jit
def visible(rows, columns, keys, shift, IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """Which of the keys `columns` the queries `rows` may see; the two broadcast.

    `shift` is keys - queries: the last query is aligned with the last key.
    """
    if IS_CAUSAL:
        seen = columns <= rows + shift
        if RAGGED:
            seen = seen & (columns < keys)
    else:
        seen = columns < keys
    return seen


@triton.jit
def keys_seen(
    start, queries, keys, ROWS: tl.constexpr, STEP: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """Where a tile of queries stops needing no mask, and where it stops seeing keys at all.

    Keys before the first mark, a multiple of STEP, are seen by every query of the tile.
    """
    clear = keys
    end = keys
    if IS_CAUSAL:
        clear = tl.minimum(keys, start + 1 + keys - queries)
        end = tl.minimum(keys, start + ROWS + keys - queries)
    return clear // STEP * STEP, end


@triton.jit
def queries_that_see(
    start, queries, keys, ROWS: tl.constexpr, STEP: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """The first query that sees a tile of keys, and the first from which on all see all of it.

    Both are multiples of STEP, the second no further than the end of the queries.
    """
    first = 0
    clear = 0
    if IS_CAUSAL:
        shift = keys - queries
        end = (queries + STEP - 1) // STEP * STEP
        first = tl.maximum(start - shift, 0) // STEP * STEP
        clear = (tl.maximum(start + ROWS - 1 - shift, 0) + STEP - 1) // STEP * STEP
        clear = tl.minimum(clear, end)
    return first, clear
