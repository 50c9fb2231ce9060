"""Decoding: a few queries of every sequence against its cached keys, the work cut into equal shares.

Every program walks over its share of the line of tiles. A unit that lies in one share is finished there; of the others
each program leaves a part (output, sum, maximum), and `decode_combine` adds the parts up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernel.ops.decode.triton.attend import finish, walk
from flashkernel.ops.decode.triton.plan import counts_of, first_of, owner_of, span, whole_units


@triton.jit
def _bound(prefix, lengths, capacity, START: tl.constexpr):
    """Keys of the shared prefix: none, a number, or a number on the device; no more than the first sequence has."""
    if START == 0:
        return 0
    else:
        most = tl.minimum(tl.maximum(tl.load(lengths), 0), capacity).to(tl.int32)
        if START == 1:
            return tl.minimum(prefix, most)
        else:
            return tl.minimum(tl.maximum(tl.load(prefix), 0), most).to(tl.int32)


@triton.jit
def _length(lengths, b, capacity, shared, SHARED: tl.constexpr):
    """Keys that a sequence has; of the pass over a shared prefix, the prefix's."""
    if SHARED:
        return shared
    else:
        return tl.minimum(tl.maximum(tl.load(lengths + b), 0), capacity).to(tl.int32)


@triton.jit
def _counts(
    lengths, batch, capacity, queries, shared, window, sink_tokens, units,
    WINDOWED: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Tiles in the line for each sequence, [BATCH]."""
    if SHARED:  # all sequences are one
        return tl.zeros([BATCH], tl.int32) + tl.maximum((shared + KEYS - 1) // KEYS, 1) * units
    else:
        return counts_of(
            tl.arange(0, BATCH), lengths, batch, capacity, queries, shared, window, sink_tokens, units, WINDOWED, KEYS
        )  # fmt: skip


@triton.jit
def _rows(row, b, bundle, batch, queries, group, SHARED: tl.constexpr, HEADS: tl.constexpr):
    """(sequence, query, query head, key/value head within the tile, whether it exists) of each row of a unit."""
    tokens = queries * batch if SHARED else queries
    row_head, rest, inside = row * 0, row, row < tokens * group
    if HEADS > 1:
        row_head, rest, inside = row // (tokens * group), row % (tokens * group), row < HEADS * tokens * group
    token = rest // group
    head = (bundle * HEADS + row_head) * group + rest % group
    if SHARED:
        return token // queries, token % queries, head, row_head, inside
    else:
        return token * 0 + b, token, head, row_head, inside


@triton.jit
def decode_pieces(
    q, k, v, k_scale, v_scale, lengths, table, sinks, before, before_lse, o, lse, partial, stats, prefix,
    q_batch, q_new, q_head, k_page, k_row, k_head, v_page, v_row, v_head, s_page, s_row, table_row,
    batch, queries, heads, group, bundles, row_tiles, capacity, window, sink_tokens, scale, softcap,
    WHOLE: tl.constexpr, SHARED: tl.constexpr, START: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_BEFORE: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    if OVERLAP:
        gdc_launch_dependents()  # the combine kernel may become resident; it waits for our results
    program, programs = tl.program_id(0), tl.num_programs(0)
    units = bundles * row_tiles
    shared = _bound(prefix, lengths, capacity, START)
    if WHOLE:  # a unit each
        counts = tl.zeros([1], tl.int32)
        ends, origin, end = counts, program, program + 1
    else:
        counts = _counts(
            lengths, batch, capacity, queries, shared, window, sink_tokens, units, WINDOWED, SHARED, KEYS, BATCH
        )  # fmt: skip
        ends = tl.cumsum(counts, 0)
        line = tl.sum(counts, 0)
        if whole_units(counts, line, units, batch, programs, SHARED):
            sequences, mine = tl.arange(0, BATCH), program // units
            share = tl.sum(tl.where(sequences == mine, counts, 0), 0) // units  # none for programs past the last unit
            origin = tl.sum(tl.where(sequences < mine, counts, 0), 0) + program % units * share
            end = origin + share
        else:
            origin, end = first_of(program, line, programs), first_of(program + 1, line, programs)
    place = origin
    while place < end:
        if WHOLE:
            b, unit = place // units, place % units
            into = 0
        else:
            past = ends <= place  # the sequences that lie before this place
            b = tl.sum(past.to(tl.int32), 0)
            into = place - tl.sum(tl.where(past, counts, 0), 0)
            unit = 0
        length = _length(lengths, b, capacity, shared, SHARED)
        front, skip, tiles, alive = span(
            length, queries, 0 if SHARED else shared, window, sink_tokens, WINDOWED, KEYS
        )  # fmt: skip
        each = tl.maximum(tiles, 1)
        if WHOLE:
            first, last = 0, each
        else:
            unit, first = into // each, into % each
            last = tl.minimum(each, first + end - place)
        bundle, row_tile = unit // row_tiles, unit % row_tiles
        sequence, query_index, head, row_head, inside = _rows(
            row_tile * ROWS + tl.arange(0, ROWS), b, bundle, batch, queries, group, SHARED, HEADS
        )  # [ROWS]
        if SHARED:
            limit = tl.load(lengths + sequence, mask=inside, other=0).to(tl.int32) - queries + query_index + 1
            limit = tl.minimum(limit, length)
        else:
            limit = length - queries + query_index + 1
        limit = tl.where(inside, limit, 0)
        width = tl.arange(0, BLOCK_D)[None, :]
        where = sequence.to(tl.int64) * q_batch + query_index * q_new + head * q_head
        query = tl.load(
            q + where[:, None] + width, mask=inside[:, None] & (width < WIDTH), other=0.0
        )  # [ROWS, BLOCK_D]
        own = b.to(tl.int64)
        pages = table
        k_first, v_first, s_first = k + bundle * HEADS * k_head, v + bundle * HEADS * v_head, bundle * HEADS
        if PAGE == 0:
            k_first, v_first, s_first = k_first + own * k_page, v_first + own * v_page, s_first + own * s_page
        else:
            pages = table + own * table_row
        output, total, top = walk(
            tl.zeros([ROWS, BLOCK_V], tl.float32), tl.zeros([ROWS], tl.float32),
            tl.full([ROWS], float("-inf"), tl.float32), query, limit, limit - window, row_head,
            k_first, v_first, k_scale, v_scale, s_first, pages,
            first, tl.minimum(last, tiles), front, skip, tiles, skip, length, 0 if SHARED else shared, alive,
            sink_tokens, scale, softcap, k_page, k_row, k_head, v_page, v_row, v_head, s_page, s_row,
            True, WINDOWED, (START > 0) and not SHARED, CAP, SCALED, PAGE, PRECISION, WIDTH, VALUES, BLOCK_D, BLOCK_V,
            KEYS, HEADS, STAGES,
        )  # fmt: skip
        if (first == 0) & (last == each):
            row_place = (sequence.to(tl.int64) * queries + query_index) * heads + head
            lse_place = (sequence.to(tl.int64) * heads + head) * queries + query_index
            finish(
                output, total, top, row_place, head, inside, o, lse, lse_place, sinks, before, before_lse,
                HAS_SINKS, HAS_BEFORE, VALUES, BLOCK_V,
            )  # fmt: skip
        else:
            slot = 2 * program.to(tl.int64) + (place != origin).to(tl.int64)
            row = tl.arange(0, ROWS)
            column = tl.arange(0, BLOCK_V)[None, :]
            tl.store(partial + (slot * ROWS + row)[:, None] * BLOCK_V + column, output, mask=inside[:, None])
            tl.store(stats + slot * 2 * ROWS + row, top, mask=inside)
            tl.store(stats + (slot * 2 + 1) * ROWS + row, total, mask=inside)
        place += 1 if WHOLE else last - first


@triton.jit
def decode_combine(
    partial, stats, lengths, sinks, before, before_lse, o, lse, prefix,
    batch, queries, heads, group, bundles, row_tiles, capacity, window, sink_tokens, programs,
    SHARED: tl.constexpr, START: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BEFORE: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of one unit's rows added up, in the order of the programs; a unit that has one part is finished."""
    units = bundles * row_tiles
    b, unit = tl.program_id(0) // units, tl.program_id(0) % units
    shared = _bound(prefix, lengths, capacity, START)
    counts = _counts(
        lengths, batch, capacity, queries, shared, window, sink_tokens, units, WINDOWED, SHARED, KEYS, BATCH
    )  # fmt: skip
    every = tl.arange(0, BATCH)
    line = tl.sum(counts, 0)
    each = tl.sum(tl.where(every == b, counts, 0), 0) // units
    place = tl.sum(tl.where(every < b, counts, 0), 0) + unit * each
    first, last = owner_of(place, line, programs), owner_of(place + each - 1, line, programs)
    if PDL:
        gdc_wait()  # all programs wait, or the next kernel could begin before the first has ended
        gdc_launch_dependents()
    if (last > first) and not whole_units(counts, line, units, batch, programs, SHARED):
        late = (first_of(first, line, programs) < place).to(tl.int64)  # the first part is its program's second
        row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] of the unit's ROWS
        sequence, query_index, head, _, inside = _rows(
            (unit % row_tiles) * ROWS + row, b, unit // row_tiles, batch, queries, group, SHARED, HEADS
        )  # fmt: skip
        inside &= row < ROWS
        column = tl.arange(0, BLOCK_V)[None, None, :]
        output = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(first, last + 1, PIECES):
            piece = begin + tl.arange(0, PIECES)
            slot = 2 * piece.to(tl.int64) + tl.where(piece == first, late, 0)  # [PIECES]
            exists = (piece <= last)[:, None] & inside[None, :]
            from_row = slot[:, None] * ROWS + row[None, :]  # [PIECES, BLOCK]
            part_top = tl.load(stats + from_row + slot[:, None] * ROWS, mask=exists, other=float("-inf"))
            part_total = tl.load(stats + from_row + (slot[:, None] + 1) * ROWS, mask=exists, other=0.0)
            part = tl.load(partial + from_row[:, :, None] * BLOCK_V + column, mask=exists[:, :, None], other=0.0)
            higher = tl.maximum(top, tl.max(part_top, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            rescale, share = tl.exp2(top - anchor), tl.exp2(part_top - anchor[None, :])
            output = output * rescale[:, None] + tl.sum(part * share[:, :, None], 0)
            total = total * rescale + tl.sum(part_total * share, 0)
            top = higher
        row_place = (sequence.to(tl.int64) * queries + query_index) * heads + head
        lse_place = (sequence.to(tl.int64) * heads + head) * queries + query_index
        finish(
            output, total, top, row_place, head, inside, o, lse, lse_place, sinks, before, before_lse,
            HAS_SINKS, HAS_BEFORE, VALUES, BLOCK_V,
        )  # fmt: skip
