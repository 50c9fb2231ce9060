"""Attention backward, from q, k, v and the saved LSE: probabilities are computed again, tile by tile.

With p = exp(score - lse) and delta = sum(o do) - dlse, the gradient of a score is p (dp - delta). One kernel holds a
tile of keys and walks over the queries that see it (dk, dv: all query heads of a group, one after another, so nothing
is added by atomics); another holds a tile of queries and walks over the keys (dq, and what bias and slopes get).
"""

import triton
import triton.language as tl

from flashkernel.ops.attention.triton.dropping import keep
from flashkernel.ops.attention.triton.scores import LOG2E, load_rows, transform, visible


@triton.jit
def attention_delta(
    o, do, dlse, delta, do_batch, do_seq, do_head, heads, queries,
    HAS_DLSE: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta[b, h, q] = sum over the head of o * do, less the gradient of lse."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    output = load_rows(
        o + b * queries * heads * VALUES + h * VALUES, row, heads * VALUES, queries, VALUES, BLOCK_V, True
    )
    gradient = load_rows(do + b * do_batch + h * do_head, row, do_seq, queries, VALUES, BLOCK_V, True)
    result = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)
    place = (b * heads + h) * queries + row
    if HAS_DLSE:
        result -= tl.load(dlse + place, mask=row < queries, other=0.0)
    tl.store(delta + place, result, mask=row < queries)


@triton.jit
def _load_lse(lse, place, row, queries):
    """LSE in powers of two; +inf, so that no probability is left, for rows that are not there or see nothing."""
    value = tl.load(lse + place + row, mask=row < queries, other=float("inf"))
    return tl.where(value == float("-inf"), float("inf"), value) * LOG2E


@triton.jit
def _score_gradient(
    probability, upstream, delta, capped, before, b, h, q, k, queries, keys, tables, softcap,
    CAP: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """(of the product, of the score before the score function): gradients, without the scale."""
    gradient = probability * (upstream - delta)
    if SLOPE is not None:
        gradient *= SLOPE(before, b, h, q, k, queries, keys, tables)
    inner = gradient
    if CAP:
        inner *= 1 - (capped / softcap) * (capped / softcap)
    return inner, gradient


@triton.jit
def attention_backward_keys(
    q, k, v, bias, slopes, do, lse, delta, dk, dv, tables, mask_tables, runs, counts,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, v_batch, v_seq, v_head, do_batch, do_seq, do_head,
    bias_batch, bias_head, bias_q, bias_k, slope_batch, runs_batch, runs_head,
    heads, group, queries, keys, most_runs, scale, softcap, seed, threshold, inverse_keep,
    MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    pair = tl.program_id(1)  # key/value head
    b = tl.program_id(2).to(tl.int64)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    k_index = column[:, None]  # [COLUMNS, 1]
    key = load_rows(k + b * k_batch + pair * k_head, column, k_seq, keys, WIDTH, BLOCK_D, True)
    value = load_rows(v + b * v_batch + pair * v_head, column, v_seq, keys, VALUES, BLOCK_V, True)
    key_sum = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    value_sum = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for member in range(group):
        h = pair * group + member
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes + b * slope_batch + h)
        stat = (b * heads + h) * queries
        place = (b * runs_batch + h * runs_head + tile).to(tl.int64)
        for run in range(tl.load(counts + place)):
            begin = tl.load(runs + (place * most_runs + run) * 3)
            end = tl.load(runs + (place * most_runs + run) * 3 + 1)
            must_mask = tl.load(runs + (place * most_runs + run) * 3 + 2)
            for MASKED in tl.static_range(2):
                for index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=STAGES):
                    row = index * ROWS + tl.arange(0, ROWS)  # [ROWS]
                    q_index = row[None, :]  # [1, ROWS]
                    query = load_rows(q + b * q_batch + h * q_head, row, q_seq, queries, WIDTH, BLOCK_D, True)
                    product = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [COLUMNS, ROWS]
                    score, capped, before = transform(
                        product, b, h, q_index, k_index, queries, keys, tables, bias + b * bias_batch + h * bias_head,
                        bias_q, bias_k, slope, scale, softcap, CAP, HAS_SLOPES, HAS_BIAS, SCORE,
                    )  # fmt: skip
                    weight = tl.exp2(score * LOG2E - _load_lse(lse, stat, row, queries)[None, :])  # [COLUMNS, ROWS]
                    if MASKED == 1:
                        seen = visible(b, h, q_index, k_index, queries, keys, mask_tables, MASK)
                        weight = tl.where(seen, weight, 0.0)
                    upstream = load_rows(do + b * do_batch + h * do_head, row, do_seq, queries, VALUES, BLOCK_V, True)
                    slope_value = tl.dot(value, tl.trans(upstream), input_precision=PRECISION)  # [COLUMNS, ROWS]
                    dropped = weight
                    if DROP:
                        kept = keep(seed, b, h, q_index, k_index, heads, queries, keys, threshold)
                        dropped = tl.where(kept, weight * inverse_keep, 0.0)
                        slope_value = tl.where(kept, slope_value * inverse_keep, 0.0)
                    value_sum = tl.dot(dropped.to(upstream.dtype), upstream, value_sum, input_precision=PRECISION)
                    shift = tl.load(delta + stat + row, mask=row < queries, other=0.0)[None, :]
                    inner, _ = _score_gradient(
                        weight, slope_value, shift, capped, before, b, h, q_index, k_index, queries, keys, tables,
                        softcap, CAP, SLOPE,
                    )  # fmt: skip
                    key_sum = tl.dot(inner.to(query.dtype), query, key_sum, input_precision=PRECISION)
    inside = (column < keys)[:, None]
    width = tl.arange(0, BLOCK_D)[None, :]
    row_place = (b * keys + column[:, None]) * (heads // group) + pair
    tl.store(dk + row_place * WIDTH + width, key_sum * scale, mask=inside & (width < WIDTH))
    width = tl.arange(0, BLOCK_V)[None, :]
    tl.store(dv + row_place * VALUES + width, value_sum, mask=inside & (width < VALUES))


@triton.jit
def attention_backward_queries(
    q, k, v, bias, slopes, do, lse, delta, dq, dbias, dslopes, tables, mask_tables, runs, counts,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, v_batch, v_seq, v_head, do_batch, do_seq, do_head,
    bias_batch, bias_head, bias_q, bias_k, dbias_batch, dbias_head, dbias_q, dbias_k, slope_batch,
    runs_batch, runs_head,
    heads, group, queries, keys, tiles, most_runs, scale, softcap, seed, threshold, inverse_keep,
    MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    WANT_BIAS: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile = tiles - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    q_index = row[:, None]  # [ROWS, 1]
    query = load_rows(q + b * q_batch + h * q_head, row, q_seq, queries, WIDTH, BLOCK_D, True)
    upstream = load_rows(do + b * do_batch + h * do_head, row, do_seq, queries, VALUES, BLOCK_V, True)
    stat = (b * heads + h) * queries
    norm = _load_lse(lse, stat, row, queries)[:, None]
    shift = tl.load(delta + stat + row, mask=row < queries, other=0.0)[:, None]
    k += b * k_batch + (h // group) * k_head
    v += b * v_batch + (h // group) * v_head
    bias += b * bias_batch + h * bias_head
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + b * slope_batch + h)
    query_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    slope_sum = tl.zeros([ROWS], tl.float32)
    place = (b * runs_batch + h * runs_head + tile).to(tl.int64)
    for run in range(tl.load(counts + place)):
        begin = tl.load(runs + (place * most_runs + run) * 3)
        end = tl.load(runs + (place * most_runs + run) * 3 + 1)
        must_mask = tl.load(runs + (place * most_runs + run) * 3 + 2)
        for MASKED in tl.static_range(2):
            for index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=STAGES):
                column = index * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
                k_index = column[None, :]  # [1, COLUMNS]
                key = load_rows(k, column, k_seq, keys, WIDTH, BLOCK_D, MASKED == 1)
                product = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [ROWS, COLUMNS]
                score, capped, before = transform(
                    product, b, h, q_index, k_index, queries, keys, tables, bias, bias_q, bias_k, slope, scale, softcap,
                    CAP, HAS_SLOPES, HAS_BIAS, SCORE,
                )  # fmt: skip
                weight = tl.exp2(score * LOG2E - norm)
                if MASKED == 1:
                    seen = visible(b, h, q_index, k_index, queries, keys, mask_tables, MASK)
                    weight = tl.where(seen, weight, 0.0)
                value = load_rows(v, column, v_seq, keys, VALUES, BLOCK_V, MASKED == 1)
                slope_value = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)  # [ROWS, COLUMNS]
                if DROP:
                    kept = keep(seed, b, h, q_index, k_index, heads, queries, keys, threshold)
                    slope_value = tl.where(kept, slope_value * inverse_keep, 0.0)
                inner, outer = _score_gradient(
                    weight, slope_value, shift, capped, before, b, h, q_index, k_index, queries, keys, tables, softcap,
                    CAP, SLOPE,
                )  # fmt: skip
                if WANT_BIAS:
                    target = (
                        dbias + b * dbias_batch + h * dbias_head + q_index.to(tl.int64) * dbias_q + k_index * dbias_k
                    )
                    tl.atomic_add(target, outer, mask=(q_index < queries) & (k_index < keys), sem="relaxed")
                if HAS_SLOPES:
                    slope_sum -= tl.sum(outer * tl.abs(q_index + (keys - queries) - k_index), 1)
                query_sum = tl.dot(inner.to(key.dtype), key, query_sum, input_precision=PRECISION)
    width = tl.arange(0, BLOCK_D)[None, :]
    target = dq + ((b * queries + row[:, None]) * heads + h) * WIDTH + width
    tl.store(target, query_sum * scale, mask=(row < queries)[:, None] & (width < WIDTH))
    if HAS_SLOPES:
        tl.store(dslopes + (b * heads + h) * tiles + tile, tl.sum(slope_sum, 0))
