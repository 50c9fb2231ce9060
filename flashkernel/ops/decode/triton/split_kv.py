"""Split-KV decoding: a few queries of every sequence against its cached keys, the K blocks shared out equally.

Every program iterates over its range of the K blocks of all work tiles (split_schedule.py). A work tile that lies in
one range is finished there. Of the others each program leaves a partial O with its row max and row sum, and
`decode_combine` merges them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernel.blocks.softmax_triton import SoftmaxState
from flashkernel.ops.decode.split_schedule import (
    blocks_per_sequence,
    k_block_range,
    one_tile_per_program,
    program_of,
    program_range,
    range_begin,
)
from flashkernel.ops.decode.triton.attend import (
    CacheTile,
    KBlocks,
    KeyBounds,
    QueryRows,
    attend_blocks,
    init_softmax,
    load_rows,
    store_output,
)


class TileRows(NamedTuple):
    """What the rows of a work tile are, [BLOCK_M] each."""

    sequence: Any
    query: Any
    head: Any  # of the queries
    kv_head: Any  # within the tile
    valid: Any


@triton.jit
def _prefix_length(prefix, cache_seqlens, capacity, PREFIX: tl.constexpr):
    """Keys of the shared prefix: at most those of the first sequence, which holds it."""
    if PREFIX == 0:
        return 0
    else:
        most = tl.minimum(tl.maximum(tl.load(cache_seqlens), 0), capacity).to(tl.int32)
        if PREFIX == 1:
            return tl.minimum(prefix, most)
        else:
            return tl.minimum(tl.maximum(tl.load(prefix), 0), most).to(tl.int32)


@triton.jit
def _seqlen(cache_seqlens, b, capacity, prefix, PREFIX_PASS: tl.constexpr):
    """Keys of a sequence; of the pass over the shared prefix, the prefix's."""
    if PREFIX_PASS:
        return prefix
    else:
        return tl.minimum(tl.maximum(tl.load(cache_seqlens + b), 0), capacity).to(tl.int32)


@triton.jit
def _blocks(cache_seqlens, sizes, prefix, window, work_tiles, CONFIG: tl.constexpr):
    """K blocks of each sequence's work tiles, [BATCH]."""
    BATCH: tl.constexpr = CONFIG.BATCH
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    if CONFIG.PREFIX_PASS:  # all sequences are one
        return tl.zeros([BATCH], tl.int32) + tl.maximum((prefix + BLOCK_N - 1) // BLOCK_N, 1) * work_tiles
    else:
        return blocks_per_sequence(
            tl.arange(0, BATCH), cache_seqlens, sizes.batch, sizes.capacity, sizes.seqlen_q, prefix, window, work_tiles,
            CONFIG.WINDOWED, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _tile_rows(row, b, head_group, sizes, CONFIG: tl.constexpr):
    """What the rows [BLOCK_M] of a sequence's group of KV heads are."""
    TILE_KV_HEADS: tl.constexpr = CONFIG.TILE_KV_HEADS
    queries = sizes.seqlen_q * sizes.batch if CONFIG.PREFIX_PASS else sizes.seqlen_q
    kv_head, rest, valid = row * 0, row, row < queries * sizes.group_size
    if TILE_KV_HEADS > 1:
        per_head = queries * sizes.group_size
        kv_head, rest, valid = row // per_head, row % per_head, row < TILE_KV_HEADS * per_head
    query = rest // sizes.group_size
    head = (head_group * TILE_KV_HEADS + kv_head) * sizes.group_size + rest % sizes.group_size
    if CONFIG.PREFIX_PASS:
        return TileRows(query // sizes.seqlen_q, query % sizes.seqlen_q, head, kv_head, valid)
    else:
        return TileRows(query * 0 + b, query, head, kv_head, valid)


@triton.jit
def _store_rows(state, rows, sizes, output, prefix_output, sinks, CONFIG: tl.constexpr):
    """Normalizes and writes a work tile's rows."""
    row = (rows.sequence.to(tl.int64) * sizes.seqlen_q + rows.query) * sizes.heads + rows.head
    lse_row = (rows.sequence.to(tl.int64) * sizes.heads + rows.head) * sizes.seqlen_q + rows.query
    store_output(state, row, lse_row, rows.head, rows.valid, output, prefix_output, sinks, CONFIG)


@triton.jit
def decode_split_kv(
    q, cache, cache_seqlens, page_table, sinks, prefix_output, output, partials, prefix, q_strides, strides, sizes,
    window, scale, softcap,
    SPLIT: tl.constexpr, SCHEDULE: tl.constexpr, ATTEND: tl.constexpr, OUTPUT: tl.constexpr,
    OVERLAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of q to each program's K blocks; without SPLIT a program takes one whole work tile."""
    PREFIX_PASS: tl.constexpr = SCHEDULE.PREFIX_PASS
    PREFIX: tl.constexpr = SCHEDULE.PREFIX
    BATCH: tl.constexpr = SCHEDULE.BATCH
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    BLOCK_N: tl.constexpr = SCHEDULE.BLOCK_N
    TILE_KV_HEADS: tl.constexpr = SCHEDULE.TILE_KV_HEADS
    BLOCK_DV: tl.constexpr = OUTPUT.BLOCK_DV
    if PDL:
        gdc_wait()
    if OVERLAP:
        gdc_launch_dependents()  # the combine kernel may become resident; it waits for our results
    program, programs = tl.program_id(0), tl.num_programs(0)
    work_tiles = sizes.head_groups * sizes.row_tiles
    prefix_len = _prefix_length(prefix, cache_seqlens, sizes.capacity, PREFIX)
    if SPLIT:
        blocks = _blocks(cache_seqlens, sizes, prefix_len, window, work_tiles, SCHEDULE)
        block_ends = tl.cumsum(blocks, 0)
        sequences = 1 if PREFIX_PASS else sizes.batch
        begin, end = program_range(tl.arange(0, BATCH), blocks, work_tiles, sequences, program, programs)
    else:
        blocks = tl.zeros([1], tl.int32)
        block_ends, begin, end = blocks, program, program + 1
    block = begin
    while block < end:
        if SPLIT:
            before = block_ends <= block  # the sequences that lie before this block
            b = tl.sum(before.to(tl.int32), 0)
            into = block - tl.sum(tl.where(before, blocks, 0), 0)
            work_tile = 0
        else:
            b, work_tile = block // work_tiles, block % work_tiles
            into = 0
        seqlen = _seqlen(cache_seqlens, b, sizes.capacity, prefix_len, PREFIX_PASS)
        visible = k_block_range(
            seqlen, sizes.seqlen_q, 0 if PREFIX_PASS else prefix_len, window, SCHEDULE.WINDOWED, BLOCK_N
        )
        tile_blocks = tl.maximum(visible.count, 1)
        if SPLIT:
            work_tile, n_begin = into // tile_blocks, into % tile_blocks
            n_end = tl.minimum(tile_blocks, n_begin + end - block)
        else:
            n_begin, n_end = 0, tile_blocks
        head_group, row_tile = work_tile // sizes.row_tiles, work_tile % sizes.row_tiles
        rows = _tile_rows(row_tile * BLOCK_M + tl.arange(0, BLOCK_M), b, head_group, sizes, SCHEDULE)
        if PREFIX_PASS:
            row_seqlen = tl.load(cache_seqlens + rows.sequence, mask=rows.valid, other=0).to(tl.int32)
            key_end = tl.minimum(row_seqlen - sizes.seqlen_q + rows.query + 1, seqlen)
        else:
            key_end = seqlen - sizes.seqlen_q + rows.query + 1
        key_end = tl.where(rows.valid, key_end, 0)
        q_offset = rows.sequence.to(tl.int64) * q_strides.batch + rows.query * q_strides.query
        q_offset += rows.head * q_strides.head
        q_tile = load_rows(q, q_offset, rows.valid, ATTEND.HEAD_DIM, ATTEND.BLOCK_D)
        kv_head = head_group * TILE_KV_HEADS
        k, v = cache.k + kv_head * strides.k_head, cache.v + kv_head * strides.v_head
        scale_offset = kv_head
        pages = page_table
        if ATTEND.PAGE_SIZE == 0:
            k += b.to(tl.int64) * strides.k_page
            v += b.to(tl.int64) * strides.v_page
            scale_offset += b.to(tl.int64) * strides.scale_page
        else:
            pages += b.to(tl.int64) * strides.page_table
        k_scale, v_scale = cache.k_scale, cache.v_scale
        if ATTEND.HAS_SCALES:
            k_scale += scale_offset
            v_scale += scale_offset
        state = attend_blocks(
            init_softmax(BLOCK_M, BLOCK_DV), QueryRows(q_tile, key_end, key_end - window.size, rows.kv_head),
            CacheTile(k, v, k_scale, v_scale, pages), strides,
            KBlocks(n_begin, tl.minimum(n_end, visible.count), visible.sink_blocks, visible.skip, visible.count,
                    visible.skip),
            KeyBounds(seqlen, visible.key_min, 0 if PREFIX_PASS else prefix_len, window.sink_tokens),
            scale, softcap, True, (PREFIX > 0) and not PREFIX_PASS, ATTEND,
        )  # fmt: skip
        if (n_begin == 0) & (n_end == tile_blocks):
            _store_rows(state, rows, sizes, output, prefix_output, sinks, OUTPUT)
        else:
            slot = 2 * program.to(tl.int64) + (block != begin).to(tl.int64)
            row = tl.arange(0, BLOCK_M)
            dim = tl.arange(0, BLOCK_DV)[None, :]
            tl.store(partials.o + (slot * BLOCK_M + row)[:, None] * BLOCK_DV + dim, state.acc, mask=rows.valid[:, None])
            tl.store(partials.stats + slot * 2 * BLOCK_M + row, state.row_max, mask=rows.valid)
            tl.store(partials.stats + (slot * 2 + 1) * BLOCK_M + row, state.row_sum, mask=rows.valid)
        block += n_end - n_begin if SPLIT else 1


@triton.jit
def decode_combine(
    partials, cache_seqlens, sinks, prefix_output, output, prefix, sizes, window, programs,
    SCHEDULE: tl.constexpr, OUTPUT: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merges the partials of BLOCK_ROWS rows of a work tile, BLOCK_SPLITS at a time, in the order of the programs."""
    BATCH: tl.constexpr = SCHEDULE.BATCH
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    BLOCK_DV: tl.constexpr = OUTPUT.BLOCK_DV
    work_tiles = sizes.head_groups * sizes.row_tiles
    b, work_tile = tl.program_id(0) // work_tiles, tl.program_id(0) % work_tiles
    prefix_len = _prefix_length(prefix, cache_seqlens, sizes.capacity, SCHEDULE.PREFIX)
    blocks = _blocks(cache_seqlens, sizes, prefix_len, window, work_tiles, SCHEDULE)
    sequence = tl.arange(0, BATCH)
    total_blocks = tl.sum(blocks, 0)
    tile_blocks = tl.sum(tl.where(sequence == b, blocks, 0), 0) // work_tiles
    block = tl.sum(tl.where(sequence < b, blocks, 0), 0) + work_tile * tile_blocks
    first = program_of(block, total_blocks, programs)
    last = program_of(block + tile_blocks - 1, total_blocks, programs)
    if PDL:
        gdc_wait()  # all programs wait, or the next kernel could begin before the first has ended
        gdc_launch_dependents()
    sequences = 1 if SCHEDULE.PREFIX_PASS else sizes.batch
    if (last > first) and not one_tile_per_program(blocks, total_blocks, work_tiles, sequences, programs):
        # Where the first program's range begins before the work tile, its partial is in the second slot.
        first_slot = (range_begin(first, total_blocks, programs) < block).to(tl.int64)
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # of the work tile's BLOCK_M
        rows = _tile_rows(
            (work_tile % sizes.row_tiles) * BLOCK_M + row, b, work_tile // sizes.row_tiles, sizes, SCHEDULE
        )
        valid = rows.valid & (row < BLOCK_M)
        dim = tl.arange(0, BLOCK_DV)[None, None, :]
        state = init_softmax(BLOCK_ROWS, BLOCK_DV)
        for begin in range(first, last + 1, BLOCK_SPLITS):
            split = begin + tl.arange(0, BLOCK_SPLITS)  # the program that computed it
            slot = 2 * split.to(tl.int64) + tl.where(split == first, first_slot, 0)  # [BLOCK_SPLITS]
            exists = (split <= last)[:, None] & valid[None, :]
            from_row = slot[:, None] * BLOCK_M + row[None, :]  # [BLOCK_SPLITS, BLOCK_ROWS]
            split_max = tl.load(partials.stats + from_row + slot[:, None] * BLOCK_M, mask=exists, other=float("-inf"))
            split_sum = tl.load(partials.stats + from_row + (slot[:, None] + 1) * BLOCK_M, mask=exists, other=0.0)
            split_o = tl.load(partials.o + from_row[:, :, None] * BLOCK_DV + dim, mask=exists[:, :, None], other=0.0)
            row_max = tl.maximum(state.row_max, tl.max(split_max, 0))
            finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
            rescale, split_scale = tl.exp2(state.row_max - finite_max), tl.exp2(split_max - finite_max[None, :])
            state = SoftmaxState(
                state.acc * rescale[:, None] + tl.sum(split_o * split_scale[:, :, None], 0),
                state.row_sum * rescale + tl.sum(split_sum * split_scale, 0), row_max,
            )  # fmt: skip
        rows = TileRows(rows.sequence, rows.query, rows.head, rows.kv_head, valid)
        _store_rows(state, rows, sizes, output, prefix_output, sinks, OUTPUT)
