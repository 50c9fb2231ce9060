"""Device code that forward and backward share: what becomes of a tile of q . k before the softmax."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def load_rows(base, row, stride, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr):
    """A tile of rows, [len(row), BLOCK]; with CLIP, rows beyond the last are zero."""
    column = tl.arange(0, BLOCK)[None, :]
    place = base + row[:, None].to(tl.int64) * stride + column
    if CLIP:
        return tl.load(place, mask=(row < rows)[:, None] & (column < WIDTH), other=0.0)
    elif BLOCK == WIDTH:
        return tl.load(place)
    else:
        return tl.load(place, mask=column < WIDTH, other=0.0)


@triton.jit
def transform(
    product, b, h, q, k, queries, keys, tables, bias, bias_q, bias_k, slope, scale, softcap,
    CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """(score, capped, before): the score of each pair, its value after the softcap, and before the score function.

    q and k are index tiles that broadcast to the product's shape; `bias` points at this batch and head.
    """
    capped = product * scale
    if CAP:
        capped = softcap * tanh(capped / softcap)
    before = capped
    if HAS_SLOPES:
        before -= slope * tl.abs(q + (keys - queries) - k)
    if HAS_BIAS:
        inside = (q < queries) & (k < keys)
        before += tl.load(bias + q.to(tl.int64) * bias_q + k * bias_k, mask=inside, other=0.0).to(tl.float32)
    score = before
    if SCORE is not None:
        score = SCORE(before, b, h, q, k, queries, keys, tables)
    return score, capped, before


@triton.jit
def visible(b, h, q, k, queries, keys, tables, MASK: tl.constexpr):
    """Which pairs of a tile exist and are seen."""
    inside = (q < queries) & (k < keys)
    if MASK is not None:
        inside &= MASK(b, h, q, k, queries, keys, tables)
    return inside
