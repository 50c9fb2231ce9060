"""Device code that forward and backward share: what becomes of a tile of q . k before the softmax."""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import tanh


@triton.jit
def program_of(tiles, heads):
    """(tile, head, batch) of a program; tiles come first, then heads. One axis: the others of a grid end at 65535."""
    program = tl.program_id(0)
    line = program // tiles
    return program % tiles, line % heads, (line // heads).to(tl.int64)


@triton.jit
def origin(b, h, by_batch, by_head, stride, TMA: tl.constexpr):
    """Where the matrix of a batch and head begins in its tensor: so many elements in, or (row, column) of a descriptor.

    With a descriptor (sources.py) batches are whole rows apart, and so are heads, unless they lie side by side.
    """
    if TMA:
        row = b.to(tl.int32) * (by_batch // stride).to(tl.int32) + h * (by_head // stride).to(tl.int32)
        return row, h * (by_head % stride).to(tl.int32)
    else:
        return b * by_batch + h.to(tl.int64) * by_head, 0


@triton.jit
def load_tile(
    source, place, first, stride, rows,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on, [COUNT, BLOCK], of the matrix at `place`; with CLIP, rows beyond the last are zero.

    A descriptor needs no CLIP: it is used where tiles end with their matrix, or their matrix with its tensor.
    """
    if TMA:
        return source.load([place[0] + first, place[1]])
    else:
        row = first + tl.arange(0, COUNT)
        column = tl.arange(0, BLOCK)[None, :]
        address = source + place[0] + row[:, None].to(tl.int64) * stride + column
        if CLIP:
            return tl.load(address, mask=(row < rows)[:, None] & (column < WIDTH), other=0.0)
        elif BLOCK == WIDTH:
            return tl.load(address)
        else:
            return tl.load(address, mask=column < WIDTH, other=0.0)


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
        place = q.to(tl.int64) * bias_q + k.to(tl.int64) * bias_k
        before += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    score = before
    if SCORE is not None:
        score = SCORE(before, b, h, q, k, queries, keys, tables)
    return score, capped, before


@triton.jit
def visible(b, h, q, k, queries, keys, tables, MASK: tl.constexpr, EVEN: tl.constexpr):
    """Which pairs of a tile exist and are seen. EVEN: queries and keys end with their tiles."""
    if MASK is None:
        return (q < queries) & (k < keys)
    elif EVEN:
        return MASK(b, h, q, k, queries, keys, tables)
    else:
        return (q < queries) & (k < keys) & MASK(b, h, q, k, queries, keys, tables)
