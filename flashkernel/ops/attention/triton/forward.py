"""Attention forward: one program holds a tile of queries and walks over the runs of key tiles that its mask leaves.

The softmax is online, in powers of two: a running maximum and sum per query, and an output that is rescaled when the
maximum rises. Full tiles are not masked, empty ones not loaded. LSE is saved instead of the probabilities.
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LN2, LOG2E, merge_row_max
from flashkernel.ops.attention.triton.dropping import keep, seed_word
from flashkernel.ops.attention.triton.scores import load_tile, origin, program_of, transform, visible


@triton.jit
def finish(
    output, total, top, row, b, h, sinks, o, lse, heads, queries,
    HAS_SINKS: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write what the rows [ROWS] of head h have summed up: output [ROWS, BLOCK_V] over total, and the LSE."""
    if HAS_SINKS:  # one more column, in the denominator only
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        rescale, extra, top = merge_row_max(top, sink)
        total = total * rescale + extra
        output *= rescale[:, None]
    nothing = total == 0.0
    output *= tl.where(nothing, 0.0, 1.0 / total)[:, None]
    log_sum = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse + (b * heads + h) * queries + row, log_sum, mask=row < queries)
    column = tl.arange(0, BLOCK_V)[None, :]
    target = o + ((b * queries + row[:, None]) * heads + h) * VALUES + column
    tl.store(target, output, mask=(row < queries)[:, None] & (column < VALUES))


@triton.jit
def attention_forward(
    q, k, v, bias, sinks, slopes, o, lse, tables, mask_tables, runs, counts,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, v_batch, v_seq, v_head,
    bias_batch, bias_head, bias_q, bias_k, slope_batch, runs_batch, runs_head,
    heads, group, queries, keys, tiles, most_runs, scale, softcap, seed, threshold, inverse_keep,
    MASK: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, DRAWN: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PLAIN: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile, h, b = program_of(tiles, heads)
    tile = tiles - 1 - tile  # under a causal mask the last tiles are the longest: they go first
    head = h.to(tl.int64)  # times a stride it may exceed int32
    row = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    q_index = row[:, None]  # [ROWS, 1]
    q_place = origin(b, h, q_batch, q_head, q_seq, TMA)
    k_place = origin(b, h // group, k_batch, k_head, k_seq, TMA)
    v_place = origin(b, h // group, v_batch, v_head, v_seq, TMA)
    query = load_tile(q, q_place, tile * ROWS, q_seq, queries, ROWS, WIDTH, BLOCK_D, True, TMA)  # [ROWS, BLOCK_D]
    bias += b * bias_batch + head * bias_head
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + b * slope_batch + h)
    # To powers of two. A plain score is scaled in the exponent, by the multiply-add that subtracts the maximum.
    if DROP:
        word = seed_word(seed, DRAWN)
    factor = LOG2E
    if PLAIN:
        factor *= scale
    top = tl.full([ROWS], float("-inf"), tl.float32)  # largest score so far, in powers of two
    total = tl.zeros([ROWS], tl.float32)  # sum of 2^(score - top)
    output = tl.zeros([ROWS, BLOCK_V], tl.float32)

    place = (b * runs_batch + h * runs_head + tile).to(tl.int64)
    for run in range(tl.load(counts + place)):
        begin = tl.load(runs + (place * most_runs + run) * 3)
        end = tl.load(runs + (place * most_runs + run) * 3 + 1)
        must_mask = tl.load(runs + (place * most_runs + run) * 3 + 2)
        for MASKED in tl.static_range(2):  # two loops, one of which is empty: the full tiles' has no mask in it
            for index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=STAGES):
                k_index = (index * COLUMNS + tl.arange(0, COLUMNS))[None, :]  # [1, COLUMNS]
                clip: tl.constexpr = MASKED == 1
                key = load_tile(k, k_place, index * COLUMNS, k_seq, keys, COLUMNS, WIDTH, BLOCK_D, clip, TMA)
                score = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [ROWS, COLUMNS]
                if not PLAIN:
                    score, _, _ = transform(
                        score, b, h, q_index, k_index, queries, keys, tables, bias, bias_q, bias_k, slope, scale,
                        softcap, CAP, HAS_SLOPES, HAS_BIAS, SCORE,
                    )  # fmt: skip
                if MASKED == 1:
                    seen = visible(b, h, q_index, k_index, queries, keys, mask_tables, MASK, EVEN)
                    score = tl.where(seen, score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, 1) * factor)
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                rescale = tl.exp2(top - anchor)
                weight = tl.exp2(score * factor - anchor[:, None])  # [ROWS, COLUMNS]
                total = total * rescale + tl.sum(weight, 1)
                if DROP:
                    kept = keep(word, b, h, q_index, k_index, heads, queries, keys, threshold)
                    weight = tl.where(kept, weight * inverse_keep, 0.0)
                value = load_tile(v, v_place, index * COLUMNS, v_seq, keys, COLUMNS, VALUES, BLOCK_V, clip, TMA)
                output = output * rescale[:, None]
                output = tl.dot(weight.to(value.dtype), value, output, input_precision=PRECISION)
                top = higher

    finish(output, total, top, row, b, h, sinks, o, lse, heads, queries, HAS_SINKS, VALUES, BLOCK_V)
