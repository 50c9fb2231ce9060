"""Device functions of the Hopper forward kernels: from S to P, row max m and row sum l, and the final scale and LSE.

A consumer's tile has 64 rows. A row is a query of one head, or with PACK_GQA > 1 of one among PACK_GQA heads: row r is
query r // PACK_GQA of head r % PACK_GQA. S and P are in the layout of the accumulator of S = Q K^T, four threads per
row. m is in units of log2 (scores times log2 e).
"""

from typing import Any, NamedTuple

from flashkernel.blocks.softmax_triton import LN2, LOG2E, merge_row_max, tanh
from flashkernel.core.gluon import gl, gluon
from flashkernel.ops.attention.hopper.overflow_retry import MARGIN_LOG2, MAX_ROW_SUM, flag_overflow
from flashkernel.ops.attention.hopper.pipeline import first_query, first_row, sequence_of


class Scales(NamedTuple):
    """`scale_log2` multiplies scores inside exp2: softmax_scale * log2(e), or 1 if they are scaled before
    (SCALE_FIRST)."""

    scale_log2: Any
    softmax_scale: Any
    softcap: Any


class ScoreParams(NamedTuple):
    """What a score depends on beside Q and K: the lengths, `Scales`, and the mask's tables."""

    seqlen_q: Any
    seqlen_k: Any
    scale_log2: Any
    softmax_scale: Any
    softcap: Any
    mask_tables: Any


@gluon.jit
def masked_scores(s, block, masked, work_tile, params, w: gl.constexpr, MASK: gl.constexpr,
                  TRAITS: gl.constexpr):  # fmt: skip
    """Returns S [64, BLOCK_N] with -inf where the mask hides a key. With SCALE_FIRST (also set with a softcap) S is
    scaled here, else inside exp2."""
    if TRAITS.SOFTCAP:
        s = (params.softcap * LOG2E) * tanh(s * (params.softmax_scale / params.softcap))
    elif TRAITS.SCALE_FIRST:
        s = s * (params.softmax_scale * LOG2E)
    if masked != 0:
        key = gl.arange(0, TRAITS.BLOCK_N, gl.SliceLayout(0, s.type.layout))[None, :]
        s = apply_mask(s, key, block * TRAITS.BLOCK_N, work_tile, params, w, MASK, TRAITS)
    return s


@gluon.jit
def apply_mask(s, key, first_key, work_tile, params, w: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr,
               HIDDEN: gl.constexpr = float("-inf")):  # fmt: skip
    """Returns S [64, BLOCK_N] with HIDDEN where the mask hides a key. The keys are first_key + key [1, BLOCK_N]."""
    if TRAITS.VARLEN:
        visible = _visible_varlen(s, key, first_key, work_tile, params, w, MASK, TRAITS)
    else:
        visible = _visible_dense(s, key, first_key, work_tile, params, w, MASK, TRAITS)
    return gl.where(visible, s, HIDDEN)


@gluon.jit
def _visible_varlen(s, key, first_key, work_tile, params, w: gl.constexpr, MASK: gl.constexpr,
                    TRAITS: gl.constexpr):  # fmt: skip
    """Which keys are visible, in packed sequences: a query is at the position of the key that it is aligned with."""
    visible = key < work_tile.num_keys - first_key
    if MASK is not None:
        BLOCK_M: gl.constexpr = 64 // TRAITS.PACK_GQA
        first = work_tile.position + w * BLOCK_M
        query = first + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)) // TRAITS.PACK_GQA  # [64]
        if TRAITS.MASK_RELATIVE:
            query = query - first_key
        else:
            key = first_key + key
        in_mask = MASK(0, work_tile.head, query[:, None], key, 0, 0, params.mask_tables)
        if TRAITS.MASK_BOUNDED:
            visible = in_mask
        else:
            visible = visible & in_mask
    return visible


@gluon.jit
def _visible_dense(s, key, first_key, work_tile, params, w: gl.constexpr, MASK: gl.constexpr,
                   TRAITS: gl.constexpr):  # fmt: skip
    """Which keys are visible, in a batch."""
    visible = key < params.seqlen_k - first_key
    if MASK is not None:
        first = first_query(work_tile, w, params.seqlen_q, TRAITS.NUM_CONSUMERS, 64 // TRAITS.PACK_GQA,
                            TRAITS.PAD_FRONT)  # fmt: skip
        query = first + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)) // TRAITS.PACK_GQA  # [64]
        if TRAITS.MASK_RELATIVE:  # it depends on q - k only: both count from first_key
            query = query - first_key
        else:
            key = first_key + key
        in_mask = MASK(work_tile.batch, work_tile.head, query[:, None], key, params.seqlen_q, params.seqlen_k,
                       params.mask_tables)  # fmt: skip
        if TRAITS.MASK_BOUNDED:  # it is False for keys >= seqlen_k
            visible = in_mask
        else:
            visible = visible & in_mask
    return visible


@gluon.jit
def block_row_max(s):
    """Returns the row max of S, [64]. Eight columns at a time: one long chain of comparisons would be all latency."""
    row_max = gl.max(gl.max(s.reshape([64, s.shape[1] // 8, 8]), 1), 1)
    return gl.convert_layout(row_max, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def exp2_scores(s, row_max, scale_log2):
    """Returns P = exp2(S * scale_log2 - m), [64, columns]."""
    return gl.exp2(s * scale_log2 - gl.convert_layout(row_max, gl.SliceLayout(1, s.type.layout))[:, None])


@gluon.jit
def online_softmax(s, row_max, scale_log2):
    """Returns (P [64, BLOCK_N], what O and l are rescaled by [64], the new m [64])."""
    new_max = gl.maximum(row_max, block_row_max(s) * scale_log2)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    return exp2_scores(s, finite_max, scale_log2), gl.exp2(row_max - finite_max), new_max


@gluon.jit
def first_softmax(s, scale_log2, FIXED_MAX: gl.constexpr):
    """Returns (P, m, l) of a work tile's first K block. With FIXED_MAX, m is higher by a margin, and a row without a
    visible key so far has m = 0."""
    row_max = block_row_max(s) * scale_log2
    if FIXED_MAX:
        row_max = gl.where(row_max == float("-inf"), 0.0, row_max + MARGIN_LOG2)
        p = exp2_scores(s, row_max, scale_log2)
    else:
        p = exp2_scores(s, gl.where(row_max == float("-inf"), 0.0, row_max), scale_log2)
    return p, row_max, partial_row_sums(p)


@gluon.jit
def partial_row_sums(p):
    """Returns l as [64, 8] sums that each need one thread's registers only; a row's l is the sum over the 8."""
    return gl.sum(p.reshape([64, p.shape[1] // 8, 8]), 1)


@gluon.jit
def finalize(row_max, row_sum, o_unit, work_tile, step, num_visited, args, w: gl.constexpr,
             CHECK_OVERFLOW: gl.constexpr, MIN_SUM: gl.constexpr, P_MAX_LOG2: gl.constexpr,
             TRAITS: gl.constexpr):  # fmt: skip
    """Stores LSE = m + log(l) of a consumer's rows. Returns what O is multiplied by, o_unit / l.

    P and l are 2^P_MAX_LOG2 times exp2(S - m). CHECK_OVERFLOW: flags the work tile if a row sum is not in
    [MIN_SUM, MAX_ROW_SUM]. A sink is one more column of S, without a row of V.
    """
    ROWS: gl.constexpr = row_max.type.layout
    PACK_GQA: gl.constexpr = TRAITS.PACK_GQA
    seqlen_q = args.scores.seqlen_q
    row = gl.arange(0, 64, ROWS)
    if TRAITS.VARLEN:  # rows of the packed tensor
        sequence = sequence_of(work_tile, args.work_tiles)
        query = sequence.q_start + first_row(sequence, w, 64 // PACK_GQA) + row // PACK_GQA  # [64]
        exists = query < sequence.q_end
    else:
        first = first_query(work_tile, w, seqlen_q, TRAITS.NUM_CONSUMERS, 64 // PACK_GQA, TRAITS.PAD_FRONT)
        query = first + row // PACK_GQA  # [64]
        exists = query < seqlen_q
    head = work_tile.head + row % PACK_GQA  # [64]
    total = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
    if CHECK_OVERFLOW:
        valid = exists & (num_visited > 0)
        flag_overflow(args.retry_flags, step, total, valid, MIN_SUM, MAX_ROW_SUM)
    if TRAITS.HAS_SINKS:
        sink = gl.load(args.sinks + head).to(gl.float32) * LOG2E
        rescale, sink_p, row_max = merge_row_max(row_max, sink)
        total = total * rescale + sink_p * 2.0**P_MAX_LOG2
        scale = gl.where(total == 0.0, 0.0, rescale * o_unit / total)
    else:
        scale = gl.where(total == 0.0, 0.0, o_unit / total)
    lse = gl.where(total == 0.0, float("-inf"), (row_max - P_MAX_LOG2 + gl.log2(total)) * LN2)
    if TRAITS.VARLEN:
        batch_head = head.to(gl.int64)
    else:
        batch_head = work_tile.batch.to(gl.int64) * args.heads + head
    gl.store(args.lse + batch_head * seqlen_q + query, lse, mask=exists)
    return scale
