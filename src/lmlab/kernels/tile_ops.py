"""Device functions shared by the attention kernels: scheduling, tile I/O, masks, split reductions.

Tensors are (batch, heads, rows, head_dim), passed to a kernel as a pointer with three strides (the
last stride is 1) or as a TMA descriptor. Batch, head and row-start offsets are 64-bit, so tensors
may exceed 2^31 elements; offsets inside a tile are 32-bit, which halves their registers and cannot
overflow for the strides that the host accepts (`views.addressable`).

A head dimension that is not a power of two is padded to the next one with zeros, which leaves the
products unchanged. All functions are inlined.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def tile_of_program(program, tiles, batch_heads, heads, l2_heads, REVERSED: tl.constexpr):
    """Map a linear program id to (tile, batch, head).

    Programs start in the order of their id. All tiles of `l2_heads` heads come before the next
    heads, so that the K and V in use fit in the L2; heads left over join the last group. Within a
    group tiles run from first to last or, if REVERSED, from last to first: the caller puts the
    longest loops first, because a long loop that starts late leaves other SMs idle at the end.
    """
    last_section = batch_heads // l2_heads - 1
    section = tl.minimum(program // (l2_heads * tiles), last_section)
    inside = program - section * l2_heads * tiles
    width = l2_heads
    if section == last_section:
        width = batch_heads - section * l2_heads
    tile = inside // width
    batch_head = section * l2_heads + inside - tile * width
    if REVERSED:
        tile = tiles - 1 - tile
    batch = batch_head // heads
    return tile, batch.to(tl.int64), (batch_head - batch * heads).to(tl.int64)


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Load rows [start, start + ROWS) of one head; BOUNDED reads zeros beyond `length`.

    Without BOUNDED all rows must exist. A descriptor always checks its bounds.
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
    """Store a tile to rows [start, start + ROWS) of one head, clipped to the tensor."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    base = target + batch * strides[0] + head * strides[1] + start.to(tl.int64) * strides[2]
    pointers = base + rows[:, None] * strides[2] + columns[None, :]
    inside = (rows < length - start)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def vector_offset(batch, head, heads, queries):
    """Offset of one head's row of lse or delta; TMA needs rows padded to 16 bytes."""
    return (batch.to(tl.int64) * heads + head) * ((queries + 3) // 4 * 4)


@triton.jit
def load_vector(source, start, length, beyond, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """Load one number per query in [start, start + ROWS), and `beyond` past the last query."""
    rows = tl.arange(0, ROWS)
    if BOUNDED:
        vector = tl.load(source + start + rows, mask=rows < length - start, other=beyond)
    else:
        vector = tl.load(source + start + rows)
    return vector


@triton.jit
def split_range(first, last, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """This split's part of the loop range [first, last), in whole blocks; may be empty."""
    size = (last - first + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = tl.minimum(first + split * size, last)
    return begin, tl.minimum(begin + size, last)


@triton.jit
def is_last_split(work_id, semaphores, SPLITS: tl.constexpr):
    """Whether this is the last split to store its partial; if so, reset the semaphore."""
    tl.debug_barrier()  # all threads must have stored before one of them signals
    complete = tl.atomic_add(semaphores + work_id, 1) == SPLITS - 1
    if complete:
        tl.store(semaphores + work_id, 0)
    return complete


@triton.jit
def store_partial(tile, index, partials, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a partial sum in the workspace, where the last split finds it by its index."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    partial = partials + tl.cast(index, tl.int64) * (ROWS * COLUMNS)
    tl.store(partial + rows[:, None] * COLUMNS + columns[None, :], tile)


@triton.jit
def reduce_partials(
    first, step, partials, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr
):
    """Add up the partials of all splits in index order.

    Other SMs wrote them: `.cg` loads from the L2, because this SM's L1 may hold stale lines.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for index in range(COUNT):
        partial = partials + tl.cast(first + index * step, tl.int64) * (ROWS * COLUMNS)
        total += tl.load(partial + rows[:, None] * COLUMNS + columns[None, :], cache_modifier=".cg")
    return total


@triton.jit
def attention_mask(offs_m, offs_n, keys, shift, IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """True where query offs_m attends to key offs_n; the two are broadcast.

    `shift` is keys - queries: the causal mask is aligned at the bottom right.
    """
    if IS_CAUSAL:
        mask = offs_n <= offs_m + shift
        if RAGGED:
            mask = mask & (offs_n < keys)
    else:
        mask = offs_n < keys
    return mask


@triton.jit
def key_range(
    start, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """For the query tile at `start`: the end of the keys that need no mask, and of all it sees.

    The first is a multiple of BLOCK_N; keys before it are visible to every query of the tile.
    """
    unmasked_end = keys
    end = keys
    if IS_CAUSAL:
        unmasked_end = tl.minimum(keys, start + 1 + keys - queries)
        end = tl.minimum(keys, start + BLOCK_M + keys - queries)
    return unmasked_end // BLOCK_N * BLOCK_N, end


@triton.jit
def query_range(
    start, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """For the key tile at `start`: the first query that sees it, and the first needing no mask.

    Both are multiples of BLOCK_M; from the second on every query sees the whole tile.
    """
    first = 0
    unmasked = 0
    if IS_CAUSAL:
        shift = keys - queries
        end = (queries + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        first = tl.maximum(start - shift, 0) // BLOCK_M * BLOCK_M
        unmasked = (tl.maximum(start + BLOCK_N - 1 - shift, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        unmasked = tl.minimum(unmasked, end)
    return first, unmasked
