"""Device code that forward and backward share: which tiles a program takes, how it loads them, and what becomes of a
tile of S = q . k before the softmax."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E, accurate_tanh, tanh
from flashkernel.ops.attention.triton.dropout import load_seed


class Matrix(NamedTuple):
    """The [seqlen, head_dim] matrix of one batch and head: a tensor's pointer, or a descriptor, and where it begins."""

    source: Any
    begin: Any  # elements from the pointer, or the descriptor's row
    column: Any  # of the descriptor
    stride: Any  # between rows
    rows: Any


class TileIndices(NamedTuple):
    """The pairs of a tile: q and k are index tensors that broadcast to the tile's shape."""

    b: Any
    h: Any
    q: Any
    k: Any


class HeadTerms(NamedTuple):
    """What changes the scores of one batch and query head."""

    bias: Any  # pointer
    slope: Any  # of ALiBi


class ScoreParams(NamedTuple):
    """What the scores of a kernel depend on; all but `scale_log2` are groups of arguments (arguments.py)."""

    sizes: Any
    bias: Any
    terms: Any
    score_tables: Any
    mask_tables: Any
    scale_log2: Any  # `exponent_scale`


class Scores(NamedTuple):
    """Of a tile: what the softmax takes, its value after the softcap, and before the score function."""

    score: Any
    capped: Any
    before: Any


@triton.jit
def program_of(tiles, heads):
    """(tile, head, batch) of a program; tiles come first, then heads. One axis: the others of a grid end at 65535."""
    program = tl.program_id(0)
    line = program // tiles
    return program % tiles, line % heads, (line // heads).to(tl.int64)


@triton.jit
def matrix_of(source, strides, b, h, rows, TMA: tl.constexpr):
    """The matrix of a batch and head.

    With a descriptor (descriptors.py) batches are whole rows apart, and so are heads, unless they lie side by side.
    """
    if TMA:
        row = b.to(tl.int32) * (strides.batch // strides.seq).to(tl.int32)
        row += h * (strides.head // strides.seq).to(tl.int32)
        return Matrix(source, row, h * (strides.head % strides.seq).to(tl.int32), strides.seq, rows)
    else:
        return Matrix(source, b * strides.batch + h.to(tl.int64) * strides.head, 0, strides.seq, rows)


@triton.jit
def load_tile(
    matrix, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr, TMA: tl.constexpr
):
    """Rows from `first` on, [COUNT, BLOCK]; with CLIP, rows beyond the last are zero.

    A descriptor needs no CLIP: it is used where tiles end with their matrix, or their matrix with its tensor.
    """
    if TMA:
        return matrix.source.load([matrix.begin + first, matrix.column])
    else:
        row = first + tl.arange(0, COUNT)
        column = tl.arange(0, BLOCK)[None, :]
        address = matrix.source + matrix.begin + row[:, None].to(tl.int64) * matrix.stride + column
        if CLIP:
            return tl.load(address, mask=(row < matrix.rows)[:, None] & (column < WIDTH), other=0.0)
        elif BLOCK == WIDTH:
            return tl.load(address)
        else:
            return tl.load(address, mask=column < WIDTH, other=0.0)


@triton.jit
def ranges_row(ranges, b, h, tile):
    """The row of the table of ranges that belongs to a work tile."""
    return (b * ranges.batch_stride + h * ranges.head_stride + tile).to(tl.int64)


@triton.jit
def load_range(ranges, row, index):
    """(first tile, end, masked) of a range."""
    begin = tl.load(ranges.table + (row * ranges.max_ranges + index) * 3)
    end = tl.load(ranges.table + (row * ranges.max_ranges + index) * 3 + 1)
    return begin, end, tl.load(ranges.table + (row * ranges.max_ranges + index) * 3 + 2)


@triton.jit
def head_of(bias, terms, b, h):
    """The bias and the ALiBi slope of a batch and head; what is absent is 0."""
    pointer = 0
    if bias.tensor is not None:
        pointer = bias.tensor + (b * bias.batch + h.to(tl.int64) * bias.head)
    slope = 0.0
    if terms.alibi_slopes is not None:
        slope = tl.load(terms.alibi_slopes + b * terms.slopes_batch + h)
    return HeadTerms(pointer, slope)


@triton.jit
def exponent_scale(terms, PLAIN: tl.constexpr):
    """What scores are multiplied by to be exponents of 2. PLAIN scores are not scaled before: they are scaled here, by
    the multiply-add that subtracts the row max."""
    scale_log2 = LOG2E
    if PLAIN:
        scale_log2 *= terms.softmax_scale
    return scale_log2


@triton.jit
def seed_of(dropout):
    """The seed of dropout; 0 without dropout."""
    seed = 0
    if dropout.threshold is not None:
        seed = load_seed(dropout)
    return seed


@triton.jit
def transform(product, at, head, params, SCORE: tl.constexpr, PRECISION: tl.constexpr):
    """The `Scores` of a tile of q . k."""
    sizes, bias, terms = params.sizes, params.bias, params.terms
    capped = product * terms.softmax_scale
    if terms.softcap is not None:
        if PRECISION == "ieee":  # the error of the other is that of softcap itself, however small the score is
            capped = terms.softcap * accurate_tanh(capped / terms.softcap)
        else:
            capped = terms.softcap * tanh(capped / terms.softcap)
    before = capped
    if terms.alibi_slopes is not None:
        before -= head.slope * tl.abs(at.q + (sizes.seqlen_k - sizes.seqlen_q) - at.k)
    if bias.tensor is not None:
        inside = (at.q < sizes.seqlen_q) & (at.k < sizes.seqlen_k)
        offset = at.q.to(tl.int64) * bias.q + at.k.to(tl.int64) * bias.k
        before += tl.load(head.bias + offset, mask=inside, other=0.0).to(tl.float32)
    score = before
    if SCORE is not None:
        score = SCORE(before, at.b, at.h, at.q, at.k, sizes.seqlen_q, sizes.seqlen_k, params.score_tables)
    return Scores(score, capped, before)


@triton.jit
def visible(at, sizes, tables, MASK: tl.constexpr, EVEN: tl.constexpr):
    """Which pairs of a tile exist and are visible. EVEN: queries and keys end with their tiles."""
    if MASK is None:
        return (at.q < sizes.seqlen_q) & (at.k < sizes.seqlen_k)
    elif EVEN:
        return MASK(at.b, at.h, at.q, at.k, sizes.seqlen_q, sizes.seqlen_k, tables)
    else:
        exists = (at.q < sizes.seqlen_q) & (at.k < sizes.seqlen_k)
        return exists & MASK(at.b, at.h, at.q, at.k, sizes.seqlen_q, sizes.seqlen_k, tables)
