"""Attention forward: a program owns a tile of queries and iterates over the ranges of key tiles that its mask leaves.

The softmax is online, in powers of two: a running row max m and row sum l per query, and an output O that is rescaled
when m rises. Full tiles are not masked, empty ones not loaded. LSE is saved instead of the probabilities.
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LN2, LOG2E, SoftmaxState, merge_row_max
from flashkernel.ops.attention.triton.dropout import keep
from flashkernel.ops.attention.triton.scores import (
    ScoreParams,
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
def store_output(state, row, b, h, sinks, outputs, sizes, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Writes O = acc / l of the rows [BLOCK_M] of head h, and their LSE = m + log(l), from a `SoftmaxState`."""
    acc, row_sum, row_max = state.acc, state.row_sum, state.row_max
    heads, seqlen_q = sizes.heads, sizes.seqlen_q
    if sinks is not None:  # one more column, in the denominator only
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        rescale, extra, row_max = merge_row_max(row_max, sink)
        row_sum = row_sum * rescale + extra
        acc *= rescale[:, None]
    sees_nothing = row_sum == 0.0
    acc *= tl.where(sees_nothing, 0.0, 1.0 / row_sum)[:, None]
    log_sum = tl.where(sees_nothing, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
    tl.store(outputs.lse + (b * heads + h) * seqlen_q + row, log_sum, mask=row < seqlen_q)
    column = tl.arange(0, BLOCK_DV)[None, :]
    target = outputs.o + ((b * seqlen_q + row[:, None]) * heads + h) * VALUE_DIM + column
    tl.store(target, acc, mask=(row < seqlen_q)[:, None] & (column < VALUE_DIM))


@triton.jit
def attention_forward(
    q, k, v, outputs, sinks, bias, terms, dropout, ranges, sizes, q_strides, k_strides, v_strides,
    score_tables, mask_tables, MASK: tl.constexpr, SCORE: tl.constexpr, TRAITS: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of queries. The groups of arguments are in arguments.py; TRAITS is `AttentionTraits`."""
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
    tile = tiles - 1 - tile  # under a causal mask the last tiles are the longest: they go first
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    q_matrix = matrix_of(q, q_strides, b, h, sizes.seqlen_q, TMA)
    k_matrix = matrix_of(k, k_strides, b, h // sizes.group_size, sizes.seqlen_k, TMA)
    v_matrix = matrix_of(v, v_strides, b, h // sizes.group_size, sizes.seqlen_k, TMA)
    q_tile = load_tile(q_matrix, tile * BLOCK_M, BLOCK_M, HEAD_DIM, BLOCK_D, True, TMA)  # [BLOCK_M, BLOCK_D]
    head = head_of(bias, terms, b, h)
    seed = seed_of(dropout)
    scale_log2 = exponent_scale(terms, TRAITS.PLAIN)
    params = ScoreParams(sizes, bias, terms, score_tables, mask_tables, scale_log2)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # m, in powers of two
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # l: the sum of 2^(s - m)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # O, not yet divided by l

    table_row = ranges_row(ranges, b, h, tile)
    for index in range(tl.load(ranges.counts + table_row)):
        begin, end, must_mask = load_range(ranges, table_row, index)
        for MASKED in tl.static_range(2):  # two loops, one of which is empty: the full tiles' has no mask in it
            for k_tile_index in tl.range(begin, tl.where(must_mask == MASKED, end, begin), num_stages=NUM_STAGES):
                first = k_tile_index * BLOCK_N
                at = TileIndices(
                    b, h, row[:, None], (first + tl.arange(0, BLOCK_N))[None, :]
                )  # [BLOCK_M, 1], [1, BLOCK_N]
                clip: tl.constexpr = MASKED == 1
                k_tile = load_tile(k_matrix, first, BLOCK_N, HEAD_DIM, BLOCK_D, clip, TMA)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
                if not TRAITS.PLAIN:
                    s = transform(s, at, head, params, SCORE, PRECISION).score
                if MASKED == 1:
                    seen = visible(at, sizes, mask_tables, MASK, TRAITS.EVEN)
                    s = tl.where(seen, s, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows that have seen nothing yet
                rescale = tl.exp2(row_max - finite_max)
                p = tl.exp2(s * scale_log2 - finite_max[:, None])  # [BLOCK_M, BLOCK_N]
                row_sum = row_sum * rescale + tl.sum(p, 1)
                if dropout.threshold is not None:
                    p = tl.where(keep(seed, at, sizes, dropout.threshold), p * dropout.scale, 0.0)
                v_tile = load_tile(v_matrix, first, BLOCK_N, VALUE_DIM, BLOCK_DV, clip, TMA)
                acc = acc * rescale[:, None]
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
                row_max = new_max

    state = SoftmaxState(acc, row_sum, row_max)
    store_output(state, row, b, h, sinks, outputs, sizes, VALUE_DIM, BLOCK_DV)
