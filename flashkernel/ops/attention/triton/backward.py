"""Attention backward, from q, k, v and the saved LSE: probabilities are computed again, tile by tile.

With p = exp(score - lse) and delta = sum(o do) - dlse, the gradient of a score is p (dp - delta). A first kernel
holds a tile of queries and walks over the keys (delta, dq, and what sinks, bias and slopes get); a second holds a tile
of keys and walks over the queries that see it (dk, dv: all query heads of a group, one after another, so nothing is
added by atomics).
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E
from flashkernel.ops.attention.triton.dropping import keep, seed_word
from flashkernel.ops.attention.triton.scores import load_tile, origin, program_of, transform, visible


@triton.jit
def _load_lse(lse, row, queries, EVEN: tl.constexpr):
    """LSE in powers of two; +inf, so that no probability is left, for rows that are not there or see nothing."""
    value = tl.load(lse + row, mask=(row < queries) | EVEN, other=float("inf"))
    return tl.where(value == float("-inf"), float("inf"), value) * LOG2E


@triton.jit
def _upstream_dot(left, right, delta, SHAPE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr):
    """left . right - delta: the gradient of a probability, less delta. The product begins there, at no cost.

    With dropout delta is subtracted later, from what is kept: see _score_gradient.
    """
    if DROP:
        return tl.dot(left, tl.trans(right), input_precision=PRECISION)
    else:
        return tl.dot(left, tl.trans(right), tl.broadcast_to(-delta, SHAPE), input_precision=PRECISION)


@triton.jit
def _score_gradient(
    probability, upstream, delta, capped, before, b, h, q, k, queries, keys, tables, softcap,
    CAP: tl.constexpr, SLOPE: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """(of the product, of the score before the score function): gradients, without the scale."""
    if DROP:
        upstream -= delta
    gradient = probability * upstream
    if SLOPE is not None:
        derivative = SLOPE(before, b, h, q, k, queries, keys, tables)
        gradient = tl.where(probability == 0.0, 0.0, gradient * derivative)  # it may be infinite for a hidden pair
    inner = gradient
    if CAP:
        inner *= 1 - (capped / softcap) * (capped / softcap)
    return inner, gradient


@triton.jit
def attention_backward_queries(
    q, k, v, bias, sinks, slopes, o, do, lse, dlse, delta, dq, dbias, dsinks, dslopes,
    tables, mask_tables, runs, counts,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, v_batch, v_seq, v_head, do_batch, do_seq, do_head,
    bias_batch, bias_head, bias_q, bias_k, dbias_batch, dbias_head, dbias_q, dbias_k, slope_batch,
    runs_batch, runs_head,
    heads, group, queries, keys, tiles, most_runs, scale, softcap, seed, threshold, inverse_keep,
    MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_DLSE: tl.constexpr, WANT_BIAS: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    DRAWN: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile, h, b = program_of(tiles, heads)
    tile = tiles - 1 - tile
    head = h.to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    q_index = row[:, None]  # [ROWS, 1]
    q_place = origin(b, h, q_batch, q_head, q_seq, TMA)
    do_place = origin(b, h, do_batch, do_head, do_seq, TMA)
    k_place = origin(b, h // group, k_batch, k_head, k_seq, TMA)
    v_place = origin(b, h // group, v_batch, v_head, v_seq, TMA)
    query = load_tile(q, q_place, tile * ROWS, q_seq, queries, ROWS, WIDTH, BLOCK_D, True, TMA)
    upstream = load_tile(do, do_place, tile * ROWS, do_seq, queries, ROWS, VALUES, BLOCK_V, True, TMA)
    out = load_tile(
        o, (((b * queries) * heads + h) * VALUES, 0), tile * ROWS, heads * VALUES, queries, ROWS, VALUES, BLOCK_V, True,
        False,
    )  # fmt: skip
    stat = (b * heads + h) * queries
    norm = _load_lse(lse + stat, row, queries, EVEN)  # [ROWS]
    shift = tl.sum(out.to(tl.float32) * upstream.to(tl.float32), 1)  # delta, [ROWS]
    if HAS_DLSE:
        shift -= tl.load(dlse + stat + row, mask=row < queries, other=0.0)
    tl.store(delta + stat + row, shift, mask=row < queries)
    if HAS_SINKS:  # a sink's probability is exp(sink - lse), and what it would add to the output is nothing
        share = tl.exp2(tl.load(sinks + h).to(tl.float32) * LOG2E - norm)
        tl.store(dsinks + (b * heads + h) * tiles + tile, -tl.sum(share * shift, 0))
    norm = norm[:, None]
    shift = shift[:, None]
    bias += b * bias_batch + head * bias_head
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + b * slope_batch + h)
    if DROP:
        word = seed_word(seed, DRAWN)
    factor = LOG2E
    if PLAIN:
        factor *= scale
    query_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    slope_sum = tl.zeros([ROWS], tl.float32)  # of ds * distance
    gradient_sum, weight_sum, lever_sum = slope_sum, slope_sum, slope_sum  # of p (dp - delta), p, p * distance
    place = (b * runs_batch + h * runs_head + tile).to(tl.int64)
    for run in range(tl.load(counts + place)):
        begin = tl.load(runs + (place * most_runs + run) * 3)
        end = tl.load(runs + (place * most_runs + run) * 3 + 1)
        must_mask = tl.load(runs + (place * most_runs + run) * 3 + 2)
        for MASKED in tl.static_range(2):
            for index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=STAGES):
                k_index = (index * COLUMNS + tl.arange(0, COLUMNS))[None, :]  # [1, COLUMNS]
                clip: tl.constexpr = MASKED == 1
                key = load_tile(k, k_place, index * COLUMNS, k_seq, keys, COLUMNS, WIDTH, BLOCK_D, clip, TMA)
                value = load_tile(v, v_place, index * COLUMNS, v_seq, keys, COLUMNS, VALUES, BLOCK_V, clip, TMA)
                product = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [ROWS, COLUMNS]
                slope_value = _upstream_dot(upstream, value, shift, [ROWS, COLUMNS], DROP, PRECISION)
                if PLAIN:
                    score, capped, before = product, product, product
                else:
                    score, capped, before = transform(
                        product, b, h, q_index, k_index, queries, keys, tables, bias, bias_q, bias_k, slope, scale,
                        softcap, CAP, HAS_SLOPES, HAS_BIAS, SCORE,
                    )  # fmt: skip
                weight = tl.exp2(score * factor - norm)
                if MASKED == 1:
                    seen = visible(b, h, q_index, k_index, queries, keys, mask_tables, MASK, EVEN)
                    weight = tl.where(seen, weight, 0.0)
                if DROP:
                    kept = keep(word, b, h, q_index, k_index, heads, queries, keys, threshold)
                    slope_value = tl.where(kept, slope_value * inverse_keep, 0.0)
                inner, outer = _score_gradient(
                    weight, slope_value, shift, capped, before, b, h, q_index, k_index, queries, keys, tables, softcap,
                    CAP, SLOPE, DROP,
                )  # fmt: skip
                if WANT_BIAS:
                    place_q = b * dbias_batch + head * dbias_head + q_index.to(tl.int64) * dbias_q
                    target = dbias + place_q + k_index.to(tl.int64) * dbias_k
                    tl.atomic_add(target, outer, mask=(q_index < queries) & (k_index < keys), sem="relaxed")
                if HAS_SLOPES:
                    distance = tl.abs(q_index + (keys - queries) - k_index)
                    slope_sum += tl.sum(outer * distance, 1)
                    gradient_sum += tl.sum(weight * ((slope_value - shift) if DROP else slope_value), 1)
                    weight_sum += tl.sum(weight, 1)
                    lever = weight
                    if SLOPE is not None:
                        derivative = SLOPE(before, b, h, q_index, k_index, queries, keys, tables)
                        lever = tl.where(weight == 0.0, 0.0, weight * derivative)
                    lever_sum += tl.sum(lever * distance, 1)
                query_sum = tl.dot(inner.to(key.dtype), key, query_sum, input_precision=PRECISION)
    width = tl.arange(0, BLOCK_D)[None, :]
    target = dq + ((b * queries + row[:, None]) * heads + h) * WIDTH + width
    tl.store(target, query_sum * scale, mask=(row < queries)[:, None] & (width < WIDTH))
    if HAS_SLOPES:
        # delta comes from an output that was rounded, and long distances would multiply its error. The sum of p dp is
        # delta without that: what it differs by is taken back.
        row_shift = tl.sum(shift, 1)
        error = row_shift - (gradient_sum + row_shift * weight_sum)
        if HAS_DLSE:
            error += tl.load(dlse + stat + row, mask=row < queries, other=0.0)
        tl.store(dslopes + (b * heads + h) * tiles + tile, -tl.sum(slope_sum + error * lever_sum, 0))


@triton.jit
def attention_backward_keys(
    q, k, v, bias, slopes, do, lse, delta, dk, dv, tables, mask_tables, runs, counts,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, v_batch, v_seq, v_head, do_batch, do_seq, do_head,
    bias_batch, bias_head, bias_q, bias_k, slope_batch, runs_batch, runs_head,
    heads, group, queries, keys, most_runs, scale, softcap, seed, threshold, inverse_keep,
    MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    CAP: tl.constexpr, DROP: tl.constexpr, DRAWN: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PLAIN: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, WANT_K: tl.constexpr,
    WANT_V: tl.constexpr,
):  # fmt: skip
    """dk and dv, or one of them where heads are so wide that registers do not hold both."""
    tile, pair, b = program_of(tl.cdiv(keys, COLUMNS), heads // group)  # pair: key/value head
    column = tile * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    k_index = column[:, None]  # [COLUMNS, 1]
    k_place = origin(b, pair, k_batch, k_head, k_seq, TMA)
    v_place = origin(b, pair, v_batch, v_head, v_seq, TMA)
    key = load_tile(k, k_place, tile * COLUMNS, k_seq, keys, COLUMNS, WIDTH, BLOCK_D, True, TMA)
    if WANT_K:
        value = load_tile(v, v_place, tile * COLUMNS, v_seq, keys, COLUMNS, VALUES, BLOCK_V, True, TMA)
    if DROP:
        word = seed_word(seed, DRAWN)
    factor = LOG2E
    if PLAIN:
        factor *= scale
    key_sum = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    value_sum = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for member in range(group):
        h = pair * group + member
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes + b * slope_batch + h)
        head = h.to(tl.int64)
        q_place = origin(b, h, q_batch, q_head, q_seq, TMA)
        do_place = origin(b, h, do_batch, do_head, do_seq, TMA)
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
                    query = load_tile(q, q_place, index * ROWS, q_seq, queries, ROWS, WIDTH, BLOCK_D, not EVEN, TMA)
                    upstream = load_tile(
                        do, do_place, index * ROWS, do_seq, queries, ROWS, VALUES, BLOCK_V, not EVEN, TMA
                    )
                    norm = _load_lse(lse + stat, row, queries, EVEN)[None, :]
                    shift = tl.load(delta + stat + row, mask=(row < queries) | EVEN, other=0.0)[None, :]
                    product = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [COLUMNS, ROWS]
                    if WANT_K:
                        slope_value = _upstream_dot(value, upstream, shift, [COLUMNS, ROWS], DROP, PRECISION)
                    if PLAIN:
                        score, capped, before = product, product, product
                    else:
                        score, capped, before = transform(
                            product, b, h, q_index, k_index, queries, keys, tables,
                            bias + b * bias_batch + head * bias_head, bias_q, bias_k, slope, scale, softcap,
                            CAP, HAS_SLOPES, HAS_BIAS, SCORE,
                        )  # fmt: skip
                    weight = tl.exp2(score * factor - norm)  # [COLUMNS, ROWS]
                    if MASKED == 1:
                        seen = visible(b, h, q_index, k_index, queries, keys, mask_tables, MASK, EVEN)
                        weight = tl.where(seen, weight, 0.0)
                    dropped = weight
                    if DROP:
                        kept = keep(word, b, h, q_index, k_index, heads, queries, keys, threshold)
                        dropped = tl.where(kept, weight * inverse_keep, 0.0)
                        if WANT_K:
                            slope_value = tl.where(kept, slope_value * inverse_keep, 0.0)
                    if WANT_V:
                        value_sum = tl.dot(dropped.to(upstream.dtype), upstream, value_sum, input_precision=PRECISION)
                    if WANT_K:
                        inner, _ = _score_gradient(
                            weight, slope_value, shift, capped, before, b, h, q_index, k_index, queries, keys, tables,
                            softcap, CAP, SLOPE, DROP,
                        )  # fmt: skip
                        key_sum = tl.dot(inner.to(query.dtype), query, key_sum, input_precision=PRECISION)
    inside = (column < keys)[:, None]
    row_place = (b * keys + column[:, None]) * (heads // group) + pair
    if WANT_K:
        width = tl.arange(0, BLOCK_D)[None, :]
        tl.store(dk + row_place * WIDTH + width, key_sum * scale, mask=inside & (width < WIDTH))
    if WANT_V:
        width = tl.arange(0, BLOCK_V)[None, :]
        tl.store(dv + row_place * VALUES + width, value_sum, mask=inside & (width < VALUES))
