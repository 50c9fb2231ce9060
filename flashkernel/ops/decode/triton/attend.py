"""Device code that decoding and prefill share: a tile of query rows walks over tiles of cached keys.

Rows are (query, head of the group) pairs; columns are (key, key/value head of the tile) pairs. The softmax is online,
in powers of two.
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LN2, LOG2E, accurate_tanh, merge_row_max


@triton.jit
def _page(table, index):
    """A page number, int32, read as two halves: of a whole one the compiler makes an asynchronous copy, to be waited
    for before those that depend on it, which leaves fewer of them in flight."""
    low = tl.load(table + 2 * index).to(tl.int32) & 0xFFFF
    high = tl.load(table + 2 * index + 1).to(tl.int32)
    return (high * 65536 + low).to(tl.int64)


@triton.jit
def walk(
    output, total, top, query, limit, low, row_head, k, v, k_scale, v_scale, s_first, table,
    first, last, front, skip, middle, far, high, start, alive, sink_tokens, scale, softcap,
    k_page, k_row, k_head, v_page, v_row, v_head, s_page, s_row,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, START: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of a walk added to (output, total, top); `limit` and `low` bound each row's keys.

    The walk's tile t is tile t of the keys for t < front, tile t + skip for t < middle, and tile t + far from there.
    k and v point at the first of the tile's key/value heads, at the sequence itself where nothing is paged (PAGE 0);
    its scales are at s_first. Of a masked tile no key from `high` on is read, and none below `alive` but the sink
    tokens: what was never written may be NaN, a page that left the window gone, a shared prefix nowhere but in one.
    """
    column = tl.arange(0, KEYS * HEADS)
    offset, head = column // HEADS, column % HEADS  # [COLUMNS]
    width = tl.arange(0, BLOCK_D)[None, :]
    value_width = tl.arange(0, BLOCK_V)[None, :]
    for index in tl.range(first, last, num_stages=STAGES):
        begin = (index + tl.where(index < front, 0, tl.where(index < middle, skip, far))) * KEYS
        position = begin + offset  # [COLUMNS]
        here = position
        if MASKED:
            here = tl.minimum(here, high - 1)
            if (WINDOWED or START) and PAGE < KEYS:
                here = tl.where((here >= alive) | (here < sink_tokens), here, high - 1)
        place = here if PAGE == 0 else here % PAGE
        k_place, v_place, s_place = place.to(tl.int64) * k_row, place.to(tl.int64) * v_row, place.to(tl.int64) * s_row
        if PAGE > 0:
            page = _page(table, begin // PAGE if PAGE >= KEYS else here // PAGE)  # one, or [COLUMNS]
            k_place, v_place, s_place = k_place + page * k_page, v_place + page * v_page, s_place + page * s_page
        k_pointer = k + (k_place + head * k_head)[:, None] + width
        v_pointer = v + (v_place + head * v_head)[:, None] + value_width
        if WIDTH == BLOCK_D:
            key = tl.load(k_pointer)  # [COLUMNS, BLOCK_D]
        else:
            key = tl.load(k_pointer, mask=width < WIDTH, other=0.0)
        if VALUES == BLOCK_V:
            value = tl.load(v_pointer)  # [COLUMNS, BLOCK_V]
        else:
            value = tl.load(v_pointer, mask=value_width < VALUES, other=0.0)
        product = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)  # [ROWS, COLUMNS]
        if SCALED:
            product *= tl.load(k_scale + s_first + s_place + head)[None, :]
        if CAP:
            score = softcap * accurate_tanh(product * (scale / softcap)) * LOG2E
        else:
            score = product * (scale * LOG2E)
        if MASKED:
            seen = position[None, :] < limit[:, None]
            if WINDOWED:
                seen &= (position[None, :] >= low[:, None]) | (position[None, :] < sink_tokens)
            if START:
                seen &= (position >= start)[None, :]
            if HEADS > 1:
                seen &= head[None, :] == row_head[:, None]
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        anchor = higher
        if MASKED:
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
        rescale = tl.exp2(top - anchor)
        weight = tl.exp2(score - anchor[:, None])  # [ROWS, COLUMNS]
        total = total * rescale + tl.sum(weight, 1)
        if SCALED:
            weight *= tl.load(v_scale + s_first + s_place + head)[None, :]
        output = output * rescale[:, None]
        output = tl.dot(weight.to(query.dtype), value.to(query.dtype), output, input_precision=PRECISION)
        top = higher
    return output, total, top


@triton.jit
def finish(
    output, total, top, place, head, inside, o, lse, lse_place, sinks, before, before_lse,
    HAS_SINKS: tl.constexpr, HAS_BEFORE: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write them: output [ROWS, BLOCK_V] to o[place], the log of the sum to lse[lse_place].

    `before` is a part of the softmax that another launch computed (a shared prefix), normalised, with its lse.
    """
    column = tl.arange(0, BLOCK_V)[None, :]
    mask = inside[:, None] & (column < VALUES)
    if HAS_BEFORE:
        other_lse = tl.load(before_lse + lse_place, mask=inside, other=float("-inf")) * LOG2E
        other = tl.load(before + place[:, None] * VALUES + column, mask=mask, other=0.0)
        rescale, share, top = merge_row_max(top, other_lse)
        output = output * rescale[:, None] + other * share[:, None]
        total = total * rescale + share
    if HAS_SINKS:  # one more column, in the denominator only
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        rescale, share, top = merge_row_max(top, sink)
        total = total * rescale + share
        output *= rescale[:, None]
    nothing = total == 0.0
    output *= tl.where(nothing, 0.0, 1.0 / total)[:, None]
    tl.store(o + place[:, None] * VALUES + column, output, mask=mask)
    log_sum = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse + lse_place, log_sum, mask=inside)
