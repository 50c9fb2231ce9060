"""Prefill through pages: many new queries of each sequence, packed one sequence behind the other.

A program takes a tile of one sequence's queries, with all heads of a group as its rows (packed GQA), and iterates over
the K blocks they see: first those that every row sees whole, without a mask, then the others.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

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


class QueryTile(NamedTuple):
    """A tile of a sequence's queries: the sequence, its tokens [begin, end), and which tile of them."""

    sequence: Any
    begin: Any
    end: Any
    index: Any


@triton.jit
def _query_tile(cu_seqlens_q, batch, tokens, program, TOKENS: tl.constexpr, BATCH: tl.constexpr):
    """The tile of a program. Tokens behind the last sequence count as one more sequence; the tile of a program that is
    one too many lies beyond its end."""
    sequence = tl.arange(0, BATCH)
    begin = tl.load(cu_seqlens_q + sequence, mask=sequence <= batch, other=0)
    end = tl.load(cu_seqlens_q + sequence + 1, mask=sequence < batch, other=0)
    end = tl.where(sequence == batch, tokens, end)
    tiles = tl.where(sequence <= batch, (end - begin + TOKENS - 1) // TOKENS, 0)
    before = (tl.cumsum(tiles, 0) <= program) & (sequence < batch)
    own = tl.sum(before.to(tl.int32), 0)
    index = program - tl.sum(tl.where(before, tiles, 0), 0)
    chosen = sequence == own
    return QueryTile(own, tl.sum(tl.where(chosen, begin, 0), 0), tl.sum(tl.where(chosen, end, 0), 0), index)


@triton.jit
def paged_prefill(
    q, cache, cu_seqlens_q, cache_seqlens, page_table, sinks, output, q_strides, strides,
    batch, tokens, heads, capacity, window, scale, softcap,
    GROUP_SIZE: tl.constexpr, BATCH: tl.constexpr, ATTEND: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of packed queries q [tokens, heads, head_dim] to the keys of their sequence."""
    BLOCK_M: tl.constexpr = ATTEND.BLOCK_M
    BLOCK_N: tl.constexpr = ATTEND.BLOCK_N
    TOKENS: tl.constexpr = BLOCK_M // GROUP_SIZE
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last tiles see most keys: longest first
    tile = _query_tile(cu_seqlens_q, batch, tokens, program, TOKENS, BATCH)
    b, end = tile.sequence, tile.end
    first_token = tile.begin + tile.index * TOKENS
    if first_token < end:
        kv_head = tl.program_id(1)
        seqlen = tl.load(cache_seqlens + b, mask=b < batch, other=0)
        seqlen = tl.minimum(tl.maximum(seqlen, 0), capacity).to(tl.int32)
        row = tl.arange(0, BLOCK_M)
        token, head = first_token + row // GROUP_SIZE, kv_head * GROUP_SIZE + row % GROUP_SIZE  # [BLOCK_M]
        valid = (row < TOKENS * GROUP_SIZE) & (token < end)
        key_end = tl.where(valid & (b < batch), seqlen - end + token + 1, 0)  # keys that a row sees lie below it
        least, most = tl.maximum(seqlen - end + first_token + 1, 0), tl.max(key_end, 0)
        # Every row sees K blocks [full_begin, full_end) whole; before them is the window's edge, behind the diagonal.
        block_end = (tl.maximum(most, 0) + BLOCK_N - 1) // BLOCK_N
        key_min, sink_blocks, edge, full_begin = 0, 0, 0, 0
        if ATTEND.WINDOWED:
            key_min = tl.maximum(least - window.size, 0)
            sink_blocks = (tl.minimum(key_min, window.sink_tokens) + BLOCK_N - 1) // BLOCK_N
            edge = tl.maximum(key_min // BLOCK_N, sink_blocks)
            full_begin = (tl.maximum(most - window.size, 0) + BLOCK_N - 1) // BLOCK_N
            full_begin = tl.minimum(tl.maximum(full_begin, edge), block_end)
        full_end = tl.maximum(tl.minimum(least // BLOCK_N, block_end), full_begin)
        q_offset = token.to(tl.int64) * q_strides.query + head * q_strides.head
        q_tile = load_rows(q, q_offset, valid, ATTEND.HEAD_DIM, ATTEND.BLOCK_D)
        k_scale, v_scale = cache.k_scale, cache.v_scale
        if ATTEND.HAS_SCALES:
            k_scale += kv_head
            v_scale += kv_head
        own = CacheTile(
            cache.k + kv_head * strides.k_head, cache.v + kv_head * strides.v_head, k_scale, v_scale,
            page_table + b.to(tl.int64) * strides.page_table,
        )  # fmt: skip
        rows = QueryRows(q_tile, key_end, key_end - window.size, row)
        bounds = KeyBounds(most, key_min, 0, window.sink_tokens)
        state = init_softmax(BLOCK_M, ATTEND.BLOCK_DV)
        # The masked blocks: the sink tokens, the window's edge, and those from full_end on.
        edge_end = sink_blocks + full_begin - edge
        for MASKED in tl.static_range(2):
            if MASKED:
                blocks = KBlocks(
                    0, edge_end + block_end - full_end, sink_blocks, edge - sink_blocks, edge_end, full_end - edge_end
                )
            else:
                blocks = KBlocks(full_begin, full_end, 0, 0, 0, 0)
            state = attend_blocks(
                state, rows, own, strides, blocks, bounds, scale, softcap, MASKED == 1, False, ATTEND
            )  # fmt: skip
        output_row = token.to(tl.int64) * heads + head
        store_output(
            state, output_row, head.to(tl.int64) * tokens + token, head, valid, output, output, sinks, OUTPUT
        )  # fmt: skip
