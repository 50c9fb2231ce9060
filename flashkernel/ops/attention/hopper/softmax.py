"""Device functions of the Hopper forward kernel: scores of a tile, their weights, and what a row comes to in the end.

A row of 64 is a query of one head, or with PACK > 1 of one among PACK heads. Scores are in the layout of the product
that they come from, four threads to a row.
"""

from flashkernel.blocks.softmax_triton import LN2, LOG2E, merge_row_max, tanh
from flashkernel.core.gluon import gl, gluon
from flashkernel.ops.attention.hopper.overflow_retry import LEAST, MARGIN, MOST, flag
from flashkernel.ops.attention.hopper.schedule import first_query


@gluon.jit
def scores_of(s, index, masked, item, numbers, mask_tables, w: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr,
              CAP: gl.constexpr, EARLY: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, PACK: gl.constexpr,
              SCORES: gl.constexpr):  # fmt: skip
    """[64, COLUMNS] products as they go into the softmax; with EARLY they leave multiplied, in powers of two."""
    queries, keys, scale, softcap = numbers
    if CAP:
        s = (softcap * LOG2E) * tanh(s * (scale / softcap))
    elif EARLY:
        s = s * (scale * LOG2E)
    if masked != 0:
        RELATIVE: gl.constexpr = TRAITS % 2 == 1  # both are counted from the tile's first key: fewer instructions
        BOUNDED: gl.constexpr = TRAITS >= 2  # the mask sees to the last key
        first = index * COLUMNS
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SCORES))[None, :]  # [1, COLUMNS]
        seen = column < keys - first
        if MASK is not None:
            tile, b, h = item
            begin = first_query(tile, w, queries, GROUPS, 64 // PACK)
            query = begin + gl.arange(0, 64, gl.SliceLayout(1, SCORES)) // PACK  # [64]
            if RELATIVE:
                visible = MASK(b, h, (query - first)[:, None], column, queries, keys, mask_tables)
            else:
                visible = MASK(b, h, query[:, None], first + column, queries, keys, mask_tables)
            if BOUNDED:
                seen = visible
            else:
                seen = seen & visible
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def largest(s, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """[64]: the largest of each row. Eight columns at a time: one long chain of comparisons would be all latency."""
    return gl.convert_layout(gl.max(gl.max(s.reshape([64, COLUMNS // 8, 8]), 1), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def weights_of(s, top, factor):
    """[64, columns]: weights of scores, beside this top."""
    return gl.exp2(s * factor - gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))[:, None])


@gluon.jit
def softmax(s, top, factor, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """(weights [64, COLUMNS], what older weights are multiplied by [64], the new top [64], in powers of two)."""
    higher = gl.maximum(top, largest(s, COLUMNS, SCORES) * factor)
    anchor = gl.where(higher == float("-inf"), 0.0, higher)
    return weights_of(s, anchor, factor), gl.exp2(top - anchor), higher


@gluon.jit
def halves(x, COLUMNS: gl.constexpr):
    """[64, COLUMNS] as twice [64, COLUMNS // 2]: a thread's registers are told apart, nothing moves."""
    return gl.split(x.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1)))


@gluon.jit
def joined(low, high):
    """Two halves as a whole."""
    both = gl.join(low, gl.convert_layout(high, low.type.layout))
    return both.permute((0, 2, 1)).reshape([64, 2 * low.shape[1]])


@gluon.jit
def sums_of(p, COLUMNS: gl.constexpr):
    """[64, 8]: sums of weights that need no other thread; a row's total is their sum."""
    return gl.sum(p.reshape([64, COLUMNS // 8, 8]), 1)


@gluon.jit
def share_of(top, parts, item, step, own, lse, shape, sinks, w: gl.constexpr, HAS_SINKS: gl.constexpr,
             GROUPS: gl.constexpr, PACK: gl.constexpr, FIXED_MAX: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """[64]: what an item's output is multiplied by in the end; its logarithms of sums are stored."""
    _, retry_flags, heads, _, queries = shape
    tile, b, h = item
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query = first_query(tile, w, queries, GROUPS, 64 // PACK) + row // PACK  # [64]
    head = h + row % PACK  # [64]
    total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
    if FIXED_MAX:
        flag(retry_flags, step, total, (query < queries) & (own > 0), LEAST, MOST)
    if HAS_SINKS:  # one more column, in the denominator only
        sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        rescale, extra, top = merge_row_max(top, sink)
        total = total * rescale + extra
        share = gl.where(total == 0.0, 0.0, rescale / total)
    else:
        share = gl.where(total == 0.0, 0.0, 1.0 / total)
    log_sum = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN2)
    gl.store(lse + (b.to(gl.int64) * heads + head) * queries + query, log_sum, mask=query < queries)
    return share


@gluon.jit
def first_weights(s, index, masked, item, numbers, factor, mask_tables, w: gl.constexpr, MASK: gl.constexpr,
                  TRAITS: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, GROUPS: gl.constexpr,
                  COLUMNS: gl.constexpr, PACK: gl.constexpr, FIXED_MAX: gl.constexpr,
                  SCORES: gl.constexpr):  # fmt: skip
    """(weights, top, sums) of an item's first tile."""
    s = scores_of(s, index, masked, item, numbers, mask_tables, w, MASK, TRAITS, CAP, EARLY, GROUPS, COLUMNS, PACK,
                  SCORES)  # fmt: skip
    top = largest(s, COLUMNS, SCORES) * factor
    if FIXED_MAX:  # a row that has seen nothing yet goes by its scores as they are
        top = gl.where(top == float("-inf"), 0.0, top + MARGIN)
        p = weights_of(s, top, factor)
    else:
        p = weights_of(s, gl.where(top == float("-inf"), 0.0, top), factor)
    return p, top, sums_of(p, COLUMNS)
