"""Prefill through pages: many new queries of each sequence, packed one sequence behind the other.

A program takes a tile of one sequence's queries, with all heads of a group as its rows, and walks over the keys they
see: the tiles that all rows see whole without a mask, then the others.
"""

import triton
import triton.language as tl

from flashkernel.ops.decode.triton.attend import finish, walk


@triton.jit
def _place(cu_seqlens, batch, tokens, program, TOKENS: tl.constexpr, BATCH: tl.constexpr):
    """(sequence, first token, end, tile): which tile of which sequence a program takes; tokens behind the last
    sequence are one more. A program that is one too many gets a tile beyond its end."""
    sequence = tl.arange(0, BATCH)
    begin = tl.load(cu_seqlens + sequence, mask=sequence <= batch, other=0)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < batch, other=0)
    end = tl.where(sequence == batch, tokens, end)
    count = tl.where(sequence <= batch, (end - begin + TOKENS - 1) // TOKENS, 0)
    past = (tl.cumsum(count, 0) <= program) & (sequence < batch)
    mine = tl.sum(past.to(tl.int32), 0)
    tile = program - tl.sum(tl.where(past, count, 0), 0)
    chosen = sequence == mine
    return mine, tl.sum(tl.where(chosen, begin, 0), 0), tl.sum(tl.where(chosen, end, 0), 0), tile


@triton.jit
def prefill(
    q, k, v, k_scale, v_scale, cu_seqlens, lengths, table, sinks, o, lse,
    q_token, q_head, k_page, k_row, k_head, v_page, v_row, v_head, s_page, s_row, table_row,
    batch, tokens, heads, capacity, window, sink_tokens, scale, softcap,
    WINDOWED: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr, HAS_SINKS: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last tiles see most: they go first
    b, begin, end, tile = _place(cu_seqlens, batch, tokens, program, TOKENS, BATCH)
    first_token = begin + tile * TOKENS
    if first_token < end:
        pair = tl.program_id(1)
        length = tl.load(lengths + b, mask=b < batch, other=0)
        length = tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32)
        row = tl.arange(0, ROWS)
        token, head = first_token + row // GROUP, pair * GROUP + row % GROUP  # [ROWS]
        inside = (row < TOKENS * GROUP) & (token < end)
        limit = tl.where(inside & (b < batch), length - end + token + 1, 0)  # keys that a row sees lie below it
        least, most = tl.maximum(length - end + first_token + 1, 0), tl.max(limit, 0)
        # Tiles that every row sees whole: [whole, partial); before them a window's edge, behind them the diagonal.
        final = (tl.maximum(most, 0) + KEYS - 1) // KEYS
        alive, front, edge, whole = 0, 0, 0, 0
        if WINDOWED:
            alive = tl.maximum(least - window, 0)
            front = (tl.minimum(alive, sink_tokens) + KEYS - 1) // KEYS
            edge = tl.maximum(alive // KEYS, front)
            whole = tl.minimum(tl.maximum((tl.maximum(most - window, 0) + KEYS - 1) // KEYS, edge), final)
        partial = tl.maximum(tl.minimum(least // KEYS, final), whole)
        width = tl.arange(0, BLOCK_D)[None, :]
        where = token.to(tl.int64) * q_token + head * q_head
        query = tl.load(
            q + where[:, None] + width, mask=inside[:, None] & (width < WIDTH), other=0.0
        )  # [ROWS, BLOCK_D]
        output, total = tl.zeros([ROWS, BLOCK_V], tl.float32), tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        k += pair * k_head
        v += pair * v_head
        pages = table + b.to(tl.int64) * table_row
        middle = front + whole - edge
        for MASKED in tl.static_range(2):
            first, last = (0, middle + final - partial) if MASKED else (whole, partial)
            ahead, skip, until, far = (front, edge - front, middle, partial - middle) if MASKED else (0, 0, 0, 0)
            output, total, top = walk(
                output, total, top, query, limit, limit - window, row, k, v, k_scale, v_scale, pair, pages,
                first, last, ahead, skip, until, far, most, 0, alive, sink_tokens, scale, softcap,
                k_page, k_row, k_head, v_page, v_row, v_head, s_page, s_row,
                MASKED == 1, WINDOWED, False, CAP, SCALED, PAGE, PRECISION, WIDTH, VALUES, BLOCK_D, BLOCK_V, KEYS, 1,
                STAGES,
            )  # fmt: skip
        place = token.to(tl.int64) * heads + head
        finish(
            output, total, top, place, head, inside, o, lse, head.to(tl.int64) * tokens + token, sinks, o, lse,
            HAS_SINKS, False, VALUES, BLOCK_V,
        )  # fmt: skip
