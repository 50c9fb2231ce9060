"""Device code that decoding and prefill share: a tile of query rows attends to blocks of cached keys.

Rows are (query, head of the group); columns are (key, KV head of the tile). The softmax is online, in powers of two:
S = scale * log2(e) * Q K^T, P = exp2(S - m), l = sum P, O = P V.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LN2, LOG2E, SoftmaxState, accurate_tanh, merge_row_max


class QueryRows(NamedTuple):
    """Rows of a tile, [BLOCK_M]: which keys each sees, and which of the tile's KV heads is its own."""

    q: Any  # [BLOCK_M, BLOCK_D]
    key_end: Any  # the first key that it does not see
    key_begin: Any  # the first key of its window
    kv_head: Any


class CacheTile(NamedTuple):
    """Where the keys and values of a tile's KV heads begin: those of the sequence itself where nothing is paged."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    page_table: Any  # the sequence's row


class KBlocks(NamedTuple):
    """Blocks [begin, end) of a list: the i-th is K block i if i < first, i + skip if i < second, else i + skip_far."""

    begin: Any
    end: Any
    first: Any
    skip: Any
    second: Any
    skip_far: Any


class KeyBounds(NamedTuple):
    """Keys that a masked block may load: below `end`, and from `begin` on or below `sink_tokens`.

    Other keys may be uninitialized (NaN), or lie in pages that were released.
    """

    end: Any
    begin: Any
    prefix: Any  # keys below it are read by the pass over the shared prefix
    sink_tokens: Any


@triton.jit
def init_softmax(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The state before the first block."""
    return SoftmaxState(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )  # fmt: skip


@triton.jit
def load_rows(q, offset, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of q [BLOCK_M, BLOCK_D] that begin at q + offset [BLOCK_M]; zero where not valid."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(q + offset[:, None] + dim, mask=valid[:, None] & (dim < HEAD_DIM), other=0.0)


@triton.jit
def _load_page_number(page_table, index):
    """An int32 entry of the page table, read as two 16-bit halves: of a 32-bit load the compiler makes an asynchronous
    copy that later copies wait for, which leaves fewer of those in flight."""
    low = tl.load(page_table + 2 * index).to(tl.int32) & 0xFFFF
    high = tl.load(page_table + 2 * index + 1).to(tl.int32)
    return (high * 65536 + low).to(tl.int64)


@triton.jit
def _load_columns(pointer, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[COLUMNS, BLOCK] from the addresses [COLUMNS, 1] on, DIM wide."""
    dim = tl.arange(0, BLOCK)[None, :]
    if DIM == BLOCK:
        return tl.load(pointer + dim)
    else:
        return tl.load(pointer + dim, mask=dim < DIM, other=0.0)


@triton.jit
def attend_blocks(
    state, rows, cache, strides, blocks, bounds, scale, softcap,
    MASKED: tl.constexpr, HAS_PREFIX: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """The softmax state after `blocks`; only MASKED blocks compare keys with what rows may see, and load no others."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    TILE_KV_HEADS: tl.constexpr = CONFIG.TILE_KV_HEADS
    PAGE_SIZE: tl.constexpr = CONFIG.PAGE_SIZE
    WINDOWED: tl.constexpr = CONFIG.WINDOWED
    PRECISION: tl.constexpr = CONFIG.PRECISION
    NUM_STAGES: tl.constexpr = CONFIG.NUM_STAGES
    column = tl.arange(0, BLOCK_N * TILE_KV_HEADS)
    offset, head = column // TILE_KV_HEADS, column % TILE_KV_HEADS  # [COLUMNS]
    acc, row_sum, row_max = state.acc, state.row_sum, state.row_max
    for index in tl.range(blocks.begin, blocks.end, num_stages=NUM_STAGES):
        skip = tl.where(index < blocks.first, 0, tl.where(index < blocks.second, blocks.skip, blocks.skip_far))
        begin = (index + skip) * BLOCK_N
        key = begin + offset  # [COLUMNS]
        loaded = key
        if MASKED:
            loaded = tl.minimum(loaded, bounds.end - 1)
            if (WINDOWED or HAS_PREFIX) and PAGE_SIZE < BLOCK_N:
                loaded = tl.where((loaded >= bounds.begin) | (loaded < bounds.sink_tokens), loaded, bounds.end - 1)
        slot = (loaded if PAGE_SIZE == 0 else loaded % PAGE_SIZE).to(tl.int64)
        k_offset, v_offset, scale_offset = slot * strides.k_row, slot * strides.v_row, slot * strides.scale_row
        if PAGE_SIZE > 0:
            # One page, or [COLUMNS] of them.
            page = _load_page_number(
                cache.page_table, begin // PAGE_SIZE if PAGE_SIZE >= BLOCK_N else loaded // PAGE_SIZE
            )
            k_offset += page * strides.k_page
            v_offset += page * strides.v_page
            scale_offset += page * strides.scale_page
        k = _load_columns(cache.k + (k_offset + head * strides.k_head)[:, None], CONFIG.HEAD_DIM, CONFIG.BLOCK_D)
        v = _load_columns(cache.v + (v_offset + head * strides.v_head)[:, None], CONFIG.VALUE_DIM, CONFIG.BLOCK_DV)
        s = tl.dot(rows.q, tl.trans(k.to(rows.q.dtype)), input_precision=PRECISION)  # [BLOCK_M, COLUMNS]
        if CONFIG.HAS_SCALES:
            s *= tl.load(cache.k_scale + scale_offset + head)[None, :]
        if CONFIG.SOFTCAP:
            s = softcap * accurate_tanh(s * (scale / softcap)) * LOG2E
        else:
            s = s * (scale * LOG2E)
        if MASKED:
            visible = key[None, :] < rows.key_end[:, None]
            if WINDOWED:
                visible &= (key[None, :] >= rows.key_begin[:, None]) | (key[None, :] < bounds.sink_tokens)
            if HAS_PREFIX:
                visible &= (key >= bounds.prefix)[None, :]
            if TILE_KV_HEADS > 1:
                visible &= head[None, :] == rows.kv_head[:, None]
            s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        finite_max = new_max
        if MASKED:
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - finite_max)
        p = tl.exp2(s - finite_max[:, None])  # [BLOCK_M, COLUMNS]
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if CONFIG.HAS_SCALES:
            p *= tl.load(cache.v_scale + scale_offset + head)[None, :]
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(rows.q.dtype), v.to(rows.q.dtype), acc, input_precision=PRECISION)
        row_max = new_max
    return SoftmaxState(acc, row_sum, row_max)


@triton.jit
def store_output(state, row, lse_row, head, valid, output, prefix_output, sinks, CONFIG: tl.constexpr):
    """Normalizes the rows and writes them: O [BLOCK_M, BLOCK_DV] to output.o[row], LSE to output.lse[lse_row].

    `prefix_output` is the normalized output over the shared prefix, with its LSE, which is merged in.
    """
    VALUE_DIM: tl.constexpr = CONFIG.VALUE_DIM
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    acc, row_sum, row_max = state.acc, state.row_sum, state.row_max
    dim = tl.arange(0, BLOCK_DV)[None, :]
    mask = valid[:, None] & (dim < VALUE_DIM)
    if CONFIG.HAS_PREFIX:
        prefix_lse = tl.load(prefix_output.lse + lse_row, mask=valid, other=float("-inf")) * LOG2E
        prefix_o = tl.load(prefix_output.o + row[:, None] * VALUE_DIM + dim, mask=mask, other=0.0)
        rescale, prefix_scale, row_max = merge_row_max(row_max, prefix_lse)
        acc = acc * rescale[:, None] + prefix_o * prefix_scale[:, None]
        row_sum = row_sum * rescale + prefix_scale
    if CONFIG.HAS_SINKS:  # one more column, in the denominator only
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        rescale, sink_scale, row_max = merge_row_max(row_max, sink)
        row_sum = row_sum * rescale + sink_scale
        acc *= rescale[:, None]
    empty = row_sum == 0.0
    acc *= tl.where(empty, 0.0, 1.0 / row_sum)[:, None]
    tl.store(output.o + row[:, None] * VALUE_DIM + dim, acc, mask=mask)
    tl.store(output.lse + lse_row, tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN2), mask=valid)
