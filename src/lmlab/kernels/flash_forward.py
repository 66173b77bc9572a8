"""proto"""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def placed(program, tiles, pairs, heads, abreast, HEAVY_LAST: tl.constexpr):
    """proto"""
    section = program // (abreast * tiles)
    inside = program - section * abreast * tiles
    width = tl.minimum(abreast, pairs - section * abreast)
    rank = inside // width
    pair = section * abreast + inside - rank * width
    batch = pair // heads
    if HEAVY_LAST:
        rank = tiles - 1 - rank
    return rank, batch.to(tl.int64), (pair - batch * heads).to(tl.int64)


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr,
):
    if DESCRIPTOR:
        tile = source.load([batch.to(tl.int32), head.to(tl.int32), start, 0]).reshape(ROWS, COLUMNS)
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        base = source + batch * strides[0] + head * strides[1] + start.to(tl.int64) * strides[2]
        pointers = base + rows[:, None] * strides[2] + columns[None, :]
        if BOUNDED:
            seen = (rows < length - start)[:, None]
            if COLUMNS != HEAD_DIM:
                seen &= (columns < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=seen, other=0.0)
        elif COLUMNS != HEAD_DIM:
            tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def attend(
    acc, total, peak, q_tile, k, v, k_strides, v_strides, batch, head, rows, first, last, keys, scale_log2,
    shift,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WARP_SPECIALIZE: tl.constexpr
):
    for start in tl.range(first, last, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        start = tl.multiple_of(start, BLOCK_N)
        k_tile = load_tile(k, k_strides, batch, head, start, keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, DESCRIPTOR)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            visible = (columns < keys)[None, :]
            if IS_CAUSAL:
                visible &= columns[None, :] <= rows[:, None] + shift
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        v_tile = load_tile(v, v_strides, batch, head, start, keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, DESCRIPTOR)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def flash_forward_kernel(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides,
    scale_log2, tiles, pairs, heads, group, abreast, queries, keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WARP_SPECIALIZE: tl.constexpr
):
    tile, batch, head = placed(tl.program_id(0), tiles, pairs, heads, abreast, IS_CAUSAL)
    start = tile * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    shift = keys - queries
    q_tile = load_tile(q, q_strides, batch, head, start, queries, BLOCK_M, BLOCK_D, HEAD_DIM, RAGGED, DESCRIPTOR)
    end = keys
    whole = keys // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(keys, start + BLOCK_M + shift)
        whole = tl.minimum(start + 1 + shift, keys) // BLOCK_N * BLOCK_N
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    kv_head = head // group
    acc, total, peak = attend(acc, total, peak, q_tile, k, v, k_strides, v_strides, batch, kv_head, rows, 0, whole, keys,
        scale_log2, shift, HEAD_DIM, BLOCK_D, BLOCK_N, IS_CAUSAL, False, PRECISION, DESCRIPTOR, WARP_SPECIALIZE)
    if IS_CAUSAL or RAGGED:
        acc, total, peak = attend(acc, total, peak, q_tile, k, v, k_strides, v_strides, batch, kv_head, rows, whole, end, keys,
            scale_log2, shift, HEAD_DIM, BLOCK_D, BLOCK_N, IS_CAUSAL, True, PRECISION, DESCRIPTOR, False)
    pair = batch * heads + head
    tl.store(lse + pair * queries + rows, (peak + tl.log2(total)) * 0.6931471805599453, mask=rows < queries)
    acc = acc / total[:, None]
    columns = tl.arange(0, BLOCK_D)
    base = o + batch * o_strides[0] + head * o_strides[1]
    tl.store(base + rows[:, None].to(tl.int64) * o_strides[2] + columns[None, :], acc.to(o.dtype.element_ty),
        mask=(rows < queries)[:, None] & (columns < HEAD_DIM)[None, :])
