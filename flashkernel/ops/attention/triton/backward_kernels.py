"""Attention backward, from q, k, v and the saved LSE: probabilities are computed again, tile by tile.

With P = exp(S - LSE) and delta = sum(O dO) - dLSE, the gradient of a score is dS = P (dP - delta). A first kernel owns
a tile of queries and iterates over the keys (delta, dQ, and the gradients of sinks, bias and slopes); a second owns a
tile of keys and iterates over the queries that see it (dK, dV: all query heads of a group, one after another, so
nothing is added by atomics).
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E
from flashkernel.ops.attention.triton.dropout import keep
from flashkernel.ops.attention.triton.scores import (
    Matrix,
    ScoreParams,
    Scores,
    TileIndices,
    exponent_scale,
    head_of,
    load_range,
    load_tile,
    matrix_of,
    program_of,
    ranges_row,
    seed_of,
    transform,
    visible,
)


@triton.jit
def _load_lse(lse, row, seqlen_q, EVEN: tl.constexpr):
    """LSE in powers of two; +inf, so that no probability is left, for rows that are not there or see nothing."""
    value = tl.load(lse + row, mask=(row < seqlen_q) | EVEN, other=float("inf"))
    return tl.where(value == float("-inf"), float("inf"), value) * LOG2E


@triton.jit
def _dp_minus_delta(left, right, delta, dropout, SHAPE: tl.constexpr, PRECISION: tl.constexpr):
    """dP - delta, with dP = left . right. The product begins at -delta, at no cost.

    With dropout it is dP: delta is subtracted later, from what is kept (_score_gradient).
    """
    if dropout.threshold is not None:
        return tl.dot(left, tl.trans(right), input_precision=PRECISION)
    else:
        return tl.dot(left, tl.trans(right), tl.broadcast_to(-delta, SHAPE), input_precision=PRECISION)


@triton.jit
def _probabilities(
    product, lse, at, head, params, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr, TRAITS: tl.constexpr
):
    """(P, scores): P of each pair from S and LSE, and the `Scores`."""
    if TRAITS.PLAIN:
        scores = Scores(product, product, product)
    else:
        PRECISION: tl.constexpr = TRAITS.PRECISION
        scores = transform(product, at, head, params, SCORE, PRECISION)
    p = tl.exp2(scores.score * params.scale_log2 - lse)
    if MASKED == 1:
        seen = visible(at, params.sizes, params.mask_tables, MASK, TRAITS.EVEN)
        p = tl.where(seen, p, 0.0)
    return p, scores


@triton.jit
def _score_derivative(scores, at, params, SCORE_GRAD: tl.constexpr):
    """The derivative of the score function, of each pair."""
    seqlen_q, seqlen_k = params.sizes.seqlen_q, params.sizes.seqlen_k
    return SCORE_GRAD(scores.before, at.b, at.h, at.q, at.k, seqlen_q, seqlen_k, params.score_tables)


@triton.jit
def _score_gradient(p, dp, delta, scores, at, params, dropout, SCORE_GRAD: tl.constexpr):
    """(gradient of q . k without the scale, gradient of the score before the score function)."""
    if dropout.threshold is not None:
        dp -= delta
    ds = p * dp
    if SCORE_GRAD is not None:
        derivative = _score_derivative(scores, at, params, SCORE_GRAD)
        ds = tl.where(p == 0.0, 0.0, ds * derivative)  # it may be infinite for a hidden pair
    dproduct = ds
    softcap = params.terms.softcap
    if softcap is not None:
        dproduct *= 1 - (scores.capped / softcap) * (scores.capped / softcap)
    return dproduct, ds


@triton.jit
def _add_bias_gradient(dbias, ds, at, sizes):
    """Adds dS [BLOCK_M, BLOCK_N] to the gradient of a bias by keys; of one for all queries, the tile's sum."""
    inside = (at.q < sizes.seqlen_q) & (at.k < sizes.seqlen_k)
    target = dbias.tensor + at.b * dbias.batch + at.h.to(tl.int64) * dbias.head + at.k.to(tl.int64) * dbias.k
    if dbias.q is None:
        ds, inside = tl.sum(tl.where(inside, ds, 0.0), 0, keep_dims=True), at.k < sizes.seqlen_k
    else:
        target += at.q.to(tl.int64) * dbias.q
    tl.atomic_add(target, ds, mask=inside, sem="relaxed")


@triton.jit
def _add_row_gradient(dbias, row_sum, b, h, row, sizes):
    """Adds sums [BLOCK_M] over all keys to the gradient of a bias that is the same for all keys."""
    inside = row < sizes.seqlen_q
    target = dbias.tensor + b * dbias.batch + h.to(tl.int64) * dbias.head
    if dbias.q is None:
        tl.atomic_add(target, tl.sum(tl.where(inside, row_sum, 0.0), 0), sem="relaxed")
    else:
        tl.atomic_add(target + row.to(tl.int64) * dbias.q, row_sum, mask=inside, sem="relaxed")


@triton.jit
def attention_backward_queries(
    q, k, v, do, o, sinks, bias, dbias, stats, gradients, terms, dropout, ranges, sizes,
    q_strides, k_strides, v_strides, do_strides, score_tables, mask_tables,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, TRAITS: tl.constexpr,
):  # fmt: skip
    """dQ and delta of one tile of queries, and what it adds to the gradients of sinks, bias and slopes.

    The groups of arguments are in arguments.py, here and below; TRAITS is `AttentionTraits`.
    """
    PRECISION: tl.constexpr = TRAITS.PRECISION
    HEAD_DIM: tl.constexpr = TRAITS.HEAD_DIM
    VALUE_DIM: tl.constexpr = TRAITS.VALUE_DIM
    BLOCK_D: tl.constexpr = TRAITS.BLOCK_D
    BLOCK_DV: tl.constexpr = TRAITS.BLOCK_DV
    BLOCK_M: tl.constexpr = TRAITS.BLOCK_M
    BLOCK_N: tl.constexpr = TRAITS.BLOCK_N
    NUM_STAGES: tl.constexpr = TRAITS.NUM_STAGES
    TMA: tl.constexpr = TRAITS.TMA
    tiles = tl.cdiv(sizes.seqlen_q, BLOCK_M)
    tile, h, b = program_of(tiles, sizes.heads)
    tile = tiles - 1 - tile  # the longest first
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    q_matrix = matrix_of(q, q_strides, b, h, sizes.seqlen_q, TMA)
    do_matrix = matrix_of(do, do_strides, b, h, sizes.seqlen_q, TMA)
    k_matrix = matrix_of(k, k_strides, b, h // sizes.group_size, sizes.seqlen_k, TMA)
    v_matrix = matrix_of(v, v_strides, b, h // sizes.group_size, sizes.seqlen_k, TMA)
    o_begin = ((b * sizes.seqlen_q) * sizes.heads + h) * VALUE_DIM
    o_matrix = Matrix(o, o_begin, 0, sizes.heads * VALUE_DIM, sizes.seqlen_q)
    q_tile = load_tile(q_matrix, tile * BLOCK_M, BLOCK_M, HEAD_DIM, BLOCK_D, True, TMA)
    do_tile = load_tile(do_matrix, tile * BLOCK_M, BLOCK_M, VALUE_DIM, BLOCK_DV, True, TMA)
    o_tile = load_tile(o_matrix, tile * BLOCK_M, BLOCK_M, VALUE_DIM, BLOCK_DV, True, False)
    stats_row = (b * sizes.heads + h) * sizes.seqlen_q
    lse = _load_lse(stats.lse + stats_row, row, sizes.seqlen_q, TRAITS.EVEN)  # [BLOCK_M]
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)  # [BLOCK_M]
    if stats.dlse is not None:
        delta -= tl.load(stats.dlse + stats_row + row, mask=row < sizes.seqlen_q, other=0.0)
    tl.store(stats.delta + stats_row + row, delta, mask=row < sizes.seqlen_q)
    if sinks is not None:  # a sink's P is exp(sink - LSE), and its dP is 0: it has no value
        p_sink = tl.exp2(tl.load(sinks + h).to(tl.float32) * LOG2E - lse)
        tl.store(gradients.dsinks + (b * sizes.heads + h) * tiles + tile, -tl.sum(p_sink * delta, 0))
    lse = lse[:, None]
    delta = delta[:, None]
    head = head_of(bias, terms, b, h)
    seed = seed_of(dropout)
    params = ScoreParams(sizes, bias, terms, score_tables, mask_tables, exponent_scale(terms, TRAITS.PLAIN))
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SLOPES: tl.constexpr = terms.alibi_slopes is not None
    BIAS_BY_ROW: tl.constexpr = dbias.tensor is not None and dbias.k is None
    dslope = tl.zeros([BLOCK_M], tl.float32)  # sum of ds * distance
    drow = tl.zeros([BLOCK_M], tl.float32)  # sum of ds
    # Of p (dp - delta), p, p * derivative * distance, p * derivative.
    ds_sum, p_sum, distance_sum, weight_sum = dslope, dslope, dslope, dslope
    table_row = ranges_row(ranges, b, h, tile)
    for index in range(tl.load(ranges.counts + table_row)):
        begin, end, must_mask = load_range(ranges, table_row, index)
        for MASKED in tl.static_range(2):
            for k_tile_index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=NUM_STAGES):
                first = k_tile_index * BLOCK_N
                at = TileIndices(
                    b, h, row[:, None], (first + tl.arange(0, BLOCK_N))[None, :]
                )  # [BLOCK_M, 1], [1, BLOCK_N]
                clip: tl.constexpr = MASKED == 1
                k_tile = load_tile(k_matrix, first, BLOCK_N, HEAD_DIM, BLOCK_D, clip, TMA)
                v_tile = load_tile(v_matrix, first, BLOCK_N, VALUE_DIM, BLOCK_DV, clip, TMA)
                product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
                dp = _dp_minus_delta(do_tile, v_tile, delta, dropout, [BLOCK_M, BLOCK_N], PRECISION)
                p, scores = _probabilities(product, lse, at, head, params, MASK, SCORE, MASKED, TRAITS)
                if dropout.threshold is not None:
                    dp = tl.where(keep(seed, at, sizes, dropout.threshold), dp * dropout.scale, 0.0)
                dproduct, ds = _score_gradient(p, dp, delta, scores, at, params, dropout, SCORE_GRAD)
                if dbias.tensor is not None and not BIAS_BY_ROW:
                    _add_bias_gradient(dbias, ds, at, sizes)
                if SLOPES or BIAS_BY_ROW:
                    distance = tl.abs(at.q + (sizes.seqlen_k - sizes.seqlen_q) - at.k)
                    dslope += tl.sum(ds * distance, 1)
                    drow += tl.sum(ds, 1)
                    ds_sum += tl.sum(p * ((dp - delta) if dropout.threshold is not None else dp), 1)
                    p_sum += tl.sum(p, 1)
                    weighted = p
                    if SCORE_GRAD is not None:
                        weighted = tl.where(p == 0.0, 0.0, p * _score_derivative(scores, at, params, SCORE_GRAD))
                    distance_sum += tl.sum(weighted * distance, 1)
                    weight_sum += tl.sum(weighted, 1)
                dq = tl.dot(dproduct.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    column = tl.arange(0, BLOCK_D)[None, :]
    target = gradients.dq + ((b * sizes.seqlen_q + row[:, None]) * sizes.heads + h) * HEAD_DIM + column
    tl.store(target, dq * terms.softmax_scale, mask=(row < sizes.seqlen_q)[:, None] & (column < HEAD_DIM))
    if SLOPES or BIAS_BY_ROW:
        # delta and LSE are rounded, and long distances or many rows would multiply their errors. P must add up to 1 in
        # each row, and the sum of p dp is delta without its error: both are put right.
        norm = p_sum
        if sinks is not None:
            norm += p_sink
        norm = tl.where(p_sum == 0.0, 1.0, norm)  # a row that sees nothing
        row_delta = tl.sum(delta, 1)
        error = row_delta - (ds_sum + row_delta * p_sum) / norm
        if stats.dlse is not None:
            error += tl.load(stats.dlse + stats_row + row, mask=row < sizes.seqlen_q, other=0.0)
        if SLOPES:
            dslope = (dslope + error * distance_sum) / norm
            tl.store(gradients.dslopes + (b * sizes.heads + h) * tiles + tile, -tl.sum(dslope, 0))
        if BIAS_BY_ROW:
            _add_row_gradient(dbias, (drow + error * weight_sum) / norm, b, h, row, sizes)


@triton.jit
def attention_backward_keys(
    q, k, v, do, bias, stats, gradients, terms, dropout, ranges, sizes, q_strides, k_strides, v_strides, do_strides,
    score_tables, mask_tables,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, TRAITS: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, or one of them where heads are so wide that registers do not hold both."""
    PRECISION: tl.constexpr = TRAITS.PRECISION
    HEAD_DIM: tl.constexpr = TRAITS.HEAD_DIM
    VALUE_DIM: tl.constexpr = TRAITS.VALUE_DIM
    BLOCK_D: tl.constexpr = TRAITS.BLOCK_D
    BLOCK_DV: tl.constexpr = TRAITS.BLOCK_DV
    BLOCK_M: tl.constexpr = TRAITS.BLOCK_M
    BLOCK_N: tl.constexpr = TRAITS.BLOCK_N
    NUM_STAGES: tl.constexpr = TRAITS.NUM_STAGES
    TMA: tl.constexpr = TRAITS.TMA
    EVEN: tl.constexpr = TRAITS.EVEN
    kv_heads = sizes.heads // sizes.group_size
    tile, kv_head, b = program_of(tl.cdiv(sizes.seqlen_k, BLOCK_N), kv_heads)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k_matrix = matrix_of(k, k_strides, b, kv_head, sizes.seqlen_k, TMA)
    v_matrix = matrix_of(v, v_strides, b, kv_head, sizes.seqlen_k, TMA)
    k_tile = load_tile(k_matrix, tile * BLOCK_N, BLOCK_N, HEAD_DIM, BLOCK_D, True, TMA)
    if WANT_K:
        v_tile = load_tile(v_matrix, tile * BLOCK_N, BLOCK_N, VALUE_DIM, BLOCK_DV, True, TMA)
    seed = seed_of(dropout)
    params = ScoreParams(sizes, bias, terms, score_tables, mask_tables, exponent_scale(terms, TRAITS.PLAIN))
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk_total, dv_total = dk_sum, dv_sum  # in float32, of the heads before: one long sum would lose digits
    for member in range(sizes.group_size):
        h = kv_head * sizes.group_size + member
        head = head_of(bias, terms, b, h)
        q_matrix = matrix_of(q, q_strides, b, h, sizes.seqlen_q, TMA)
        do_matrix = matrix_of(do, do_strides, b, h, sizes.seqlen_q, TMA)
        stats_row = (b * sizes.heads + h) * sizes.seqlen_q
        table_row = ranges_row(ranges, b, h, tile)
        for index in range(tl.load(ranges.counts + table_row)):
            begin, end, must_mask = load_range(ranges, table_row, index)
            for MASKED in tl.static_range(2):
                for q_tile_index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=NUM_STAGES):
                    first = q_tile_index * BLOCK_M
                    row = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
                    at = TileIndices(b, h, row[None, :], column[:, None])  # [1, BLOCK_M], [BLOCK_N, 1]
                    q_tile = load_tile(q_matrix, first, BLOCK_M, HEAD_DIM, BLOCK_D, not EVEN, TMA)
                    do_tile = load_tile(do_matrix, first, BLOCK_M, VALUE_DIM, BLOCK_DV, not EVEN, TMA)
                    lse = _load_lse(stats.lse + stats_row, row, sizes.seqlen_q, EVEN)[None, :]
                    delta = tl.load(stats.delta + stats_row + row, mask=(row < sizes.seqlen_q) | EVEN, other=0.0)
                    delta = delta[None, :]
                    product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
                    if WANT_K:
                        dp = _dp_minus_delta(v_tile, do_tile, delta, dropout, [BLOCK_N, BLOCK_M], PRECISION)
                    p, scores = _probabilities(product, lse, at, head, params, MASK, SCORE, MASKED, TRAITS)
                    dropped = p  # [BLOCK_N, BLOCK_M]
                    if dropout.threshold is not None:
                        kept = keep(seed, at, sizes, dropout.threshold)
                        dropped = tl.where(kept, p * dropout.scale, 0.0)
                        if WANT_K:
                            dp = tl.where(kept, dp * dropout.scale, 0.0)
                    if WANT_V:
                        dv_sum = tl.dot(dropped.to(do_tile.dtype), do_tile, dv_sum, input_precision=PRECISION)
                    if WANT_K:
                        dproduct, _ = _score_gradient(p, dp, delta, scores, at, params, dropout, SCORE_GRAD)
                        dk_sum = tl.dot(dproduct.to(q_tile.dtype), q_tile, dk_sum, input_precision=PRECISION)
        if PRECISION == "ieee":
            dk_total += dk_sum
            dv_total += dv_sum
            dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if PRECISION == "ieee":
        dk_sum, dv_sum = dk_total, dv_total
    inside = (column < sizes.seqlen_k)[:, None]
    target_row = (b * sizes.seqlen_k + column[:, None]) * kv_heads + kv_head
    if WANT_K:
        width = tl.arange(0, BLOCK_D)[None, :]
        tl.store(
            gradients.dk + target_row * HEAD_DIM + width, dk_sum * terms.softmax_scale, mask=inside & (width < HEAD_DIM)
        )  # fmt: skip
    if WANT_V:
        width = tl.arange(0, BLOCK_DV)[None, :]
        tl.store(gradients.dv + target_row * VALUE_DIM + width, dv_sum, mask=inside & (width < VALUE_DIM))
