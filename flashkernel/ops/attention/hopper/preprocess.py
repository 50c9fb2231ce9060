"""Preprocess and postprocess kernels of the Hopper backward pass: delta and the scaled LSE before it, dq from its
float32 buffer and the gradient of the sinks after it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E


@triton.jit
def attention_backward_preprocess(
    o, do, lse, dlse, sinks, stats, dq, dsinks, do_batch, do_seq, do_head, heads, queries, padded, unit,
    HAS_DLSE: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is added to S and dP: -lse in units of 1 / `unit`, and -delta = dlse - sum(o do); a dq of zeros.

    `stats` has first the one and then the other, for rows up to a whole number of tiles. Those that are not there or
    see nothing get an lse of +inf, which leaves no probability. Heads come first in the grid: what neighbouring
    programs read lies side by side. The first batch comes last, and is in L2 when the next kernel begins with it.
    """
    if PDL:
        gdc_launch_dependents()  # it waits for what is computed here
    blocks = padded // BLOCK
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    batch = tl.num_programs(0) // (heads * blocks)
    b = (batch - 1 - tl.program_id(0) // (heads * blocks)).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    column = tl.arange(0, BLOCK_V)[None, :]
    inside = (row < queries)[:, None] & (column < VALUES)
    output = tl.load(o + ((b * queries + row[:, None]) * heads + h) * VALUES + column, mask=inside, other=0.0)
    upstream = tl.load(
        do + b * do_batch + h.to(tl.int64) * do_head + row[:, None].to(tl.int64) * do_seq + column,
        mask=inside, other=0.0,
    )  # fmt: skip
    shift = tl.sum(output.to(tl.float32) * upstream.to(tl.float32), 1)
    stat = (b * heads + h) * queries + row
    if HAS_DLSE:
        shift -= tl.load(dlse + stat, mask=row < queries, other=0.0)
    value = tl.load(lse + stat, mask=row < queries, other=float("-inf"))
    value = tl.where(value == float("-inf"), float("inf"), value)
    place = (b * heads + h) * padded + row
    total = batch.to(tl.int64) * heads * padded
    tl.store(stats + place, -value * unit, mask=row < padded)
    tl.store(stats + total + place, -shift, mask=row < padded)
    if HAS_SINKS:  # a sink's probability is exp(sink - lse), and what it would add to the output is nothing
        share = tl.exp2((tl.load(sinks + h).to(tl.float32) - value) * LOG2E)
        tl.store(dsinks + (b * heads + h) * blocks + block, -tl.sum(share * shift, 0))
    width = tl.arange(0, WIDTH)[None, :]
    zeros = tl.zeros([BLOCK, WIDTH], tl.float32)
    tl.store(dq + place[:, None] * WIDTH + width, zeros, mask=(row < padded)[:, None])


@triton.jit
def attention_backward_postprocess(
    buffer, dq, partial, dsinks, scale, heads, queries, query_tiles, blocks,
    HAS_SINKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dq from its buffer, whose tiles have an ORDER by the way they were added up (`Backward.dq`): "sent", their own;
    in "halves", each of them that of registers (`add` in backward_parts.py); "apart", that of registers of the tile
    transposed.

    The last batch, to which was added last, comes first: it is still in L2. The first program of each head adds up the
    gradient of its sink, which attention_backward_preprocess left in parts [batch, heads, blocks].
    """
    if PDL:
        pdl_enter()
    h = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads % query_tiles
    b = ((tl.num_programs(0) - 1 - tl.program_id(0)) // (heads * query_tiles)).to(tl.int64)
    if HAS_SINKS:  # noqa: SIM102  decided by the compiler, unlike the next
        if tl.program_id(0) < heads:
            sums = tl.zeros([128], tl.float32)
            for other in range(tl.num_programs(0) // (heads * query_tiles)):
                for first in range(0, blocks, 128):
                    lane = first + tl.arange(0, 128)
                    sums += tl.load(partial + (other * heads + h) * blocks + lane, mask=lane < blocks, other=0.0)
            tl.store(dsinks + h, tl.sum(sums, 0))
    start = buffer + ((b * heads + h) * query_tiles + tile) * (ROWS * BLOCK)
    value = tl.load(start + tl.arange(0, ROWS * BLOCK)) * scale
    value = value.to(dq.dtype.element_ty)
    if ORDER == "halves":  # (half, j, w, r, c, i, e): halves of rows or of columns
        halves = value.reshape([2, ROWS * BLOCK // 1024, 4, 8, 4, 2, 2])
        value = tl.permute(halves, (0, 2, 5, 3, 1, 4, 6) if ROWS == 128 else (2, 5, 3, 0, 1, 4, 6))
    elif ORDER == "apart":  # (j, w, r, c, i, e)
        value = tl.permute(value.reshape([ROWS // 8, 4, 8, 4, 2, 2]), (0, 3, 5, 1, 4, 2))
    value = value.reshape([ROWS, BLOCK])
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = (b * queries + row) * heads + h
    tl.store(dq + place * WIDTH + column, value, mask=(row < queries) & (column < WIDTH))
