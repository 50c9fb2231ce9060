"""Preprocess and postprocess kernels of the Hopper backward pass: delta and the scaled LSE before the main kernel, dQ
from its float32 accumulator and the gradient of the sinks after it.

Of packed sequences (varlen) every sequence begins with a block of its own: query_blocks, int32 [blocks, 2], has the
first row of each block in the packed tensors and the number of its rows. Without it, blocks are those of a batch entry.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E


@triton.jit
def _rows(query_blocks, padded_row, block, seqlen_q, TABLE_BLOCK: tl.constexpr):
    """(rows in o, lse and dq, which of them exist), [rows] each; `block` is their block in query_blocks."""
    if query_blocks is None:
        row = padded_row
        exists = row < seqlen_q
    else:
        within = padded_row - block * TABLE_BLOCK
        row = tl.load(query_blocks + block * 2) + within
        exists = within < tl.load(query_blocks + block * 2 + 1)
    return row, exists


@triton.jit
def attention_backward_preprocess(
    o, do, lse, dlse, sinks, lse_delta, delta_rows, dq_accum, dsinks, query_blocks, do_batch, do_seq, do_head, heads,
    seqlen_q, padded, lse_scale, HAS_DLSE: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
    TABLE_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Stores -LSE * lse_scale and -delta = dLSE - rowsum(dO * O), and zeroes dq_accum. Where dQ is computed by a kernel
    of its own there is none, and delta is also stored as `lse` is laid out (delta_rows).

    lse_delta is [2, batch, heads, padded], with `padded` queries up to a whole number of blocks. Queries that do not
    exist or see no key get an LSE of +inf, so that P = 0. Heads come first in the grid: neighboring programs read
    neighboring addresses. The first batch entry comes last: it is in L2 when the main kernel begins with it.
    TABLE_BLOCK is the number of rows of a block in query_blocks.
    """
    if PDL:
        gdc_launch_dependents()  # the main kernel waits for what is computed here
    blocks = padded // BLOCK_M
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    batch = tl.num_programs(0) // (heads * blocks)
    b = (batch - 1 - tl.program_id(0) // (heads * blocks)).to(tl.int64)
    padded_row = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row, exists = _rows(query_blocks, padded_row, block * BLOCK_M // TABLE_BLOCK, seqlen_q, TABLE_BLOCK)
    column = tl.arange(0, BLOCK_DV)[None, :]
    inside = exists[:, None] & (column < VALUE_DIM)
    o_tile = tl.load(o + ((b * seqlen_q + row[:, None]) * heads + h) * VALUE_DIM + column, mask=inside, other=0.0)
    do_tile = tl.load(
        do + b * do_batch + h.to(tl.int64) * do_head + row[:, None].to(tl.int64) * do_seq + column,
        mask=inside, other=0.0,
    )  # fmt: skip
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)  # [BLOCK_M]
    query = (b * heads + h) * seqlen_q + row
    if HAS_DLSE:
        delta -= tl.load(dlse + query, mask=exists, other=0.0)
    row_lse = tl.load(lse + query, mask=exists, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    padded_query = (b * heads + h) * padded + padded_row
    delta_start = batch.to(tl.int64) * heads * padded
    tl.store(lse_delta + padded_query, -row_lse * lse_scale, mask=padded_row < padded)
    tl.store(lse_delta + delta_start + padded_query, -delta, mask=padded_row < padded)
    if delta_rows is not None:
        tl.store(delta_rows + query, delta, mask=exists)
    if HAS_SINKS:  # a sink has P = exp(sink - LSE) and no value: dS = P (0 - delta)
        p_sink = tl.exp2((tl.load(sinks + h).to(tl.float32) - row_lse) * LOG2E)
        tl.store(dsinks + (b * heads + h) * blocks + block, -tl.sum(p_sink * delta, 0))
    if dq_accum is not None:
        dq_column = tl.arange(0, BLOCK_D)[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        cleared = padded_row < padded
        if query_blocks is not None:  # a block without rows is never added to
            cleared = cleared & (tl.max(exists.to(tl.int32), 0) > 0)
        tl.store(dq_accum + padded_query[:, None] * BLOCK_D + dq_column, zeros, mask=cleared[:, None])


@triton.jit
def attention_backward_postprocess(
    dq_accum, dq, dsinks_partial, dsinks, query_blocks, softmax_scale, heads, seqlen_q, q_blocks, sink_blocks,
    HAS_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    DQ_MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores dQ = dq_accum * softmax_scale in the dtype of dq, and the gradient of the sinks.

    The order of elements in a block of dq_accum depends on how they were added (`BackwardConfig.dq_mode`): row-major
    with "tma_reduce"; with "atomic", each half is `in_register_order` (backward_common.py); with "dq_warpgroup", the
    transposed block is.

    The last batch entry, which the main kernel added to last, comes first: it is still in L2. The first program of each
    head sums the gradient of its sink over dsinks_partial, [batch, heads, sink_blocks].
    """
    if PDL:
        pdl_enter()
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % q_blocks
    b = ((tl.num_programs(0) - 1 - tl.program_id(0)) // (heads * q_blocks)).to(tl.int64)
    if HAS_SINKS:  # noqa: SIM102  decided by the compiler, unlike the next
        if tl.program_id(0) < heads:
            sums = tl.zeros([128], tl.float32)
            for batch in range(tl.num_programs(0) // (heads * q_blocks)):
                for first in range(0, sink_blocks, 128):
                    lane = first + tl.arange(0, 128)
                    address = dsinks_partial + (batch * heads + h) * sink_blocks + lane
                    sums += tl.load(address, mask=lane < sink_blocks, other=0.0)
            tl.store(dsinks + h, tl.sum(sums, 0))
    start = dq_accum + ((b * heads + h) * q_blocks + block) * (BLOCK_M * BLOCK_D)
    tile = tl.load(start + tl.arange(0, BLOCK_M * BLOCK_D)) * softmax_scale
    tile = tile.to(dq.dtype.element_ty)
    if DQ_MODE == "atomic":  # (half, j, w, r, c, i, e): halves of rows or of columns
        halves = tile.reshape([2, BLOCK_M * BLOCK_D // 1024, 4, 8, 4, 2, 2])
        tile = tl.permute(halves, (0, 2, 5, 3, 1, 4, 6) if BLOCK_M == 128 else (2, 5, 3, 0, 1, 4, 6))
    elif DQ_MODE == "dq_warpgroup":  # (j, w, r, c, i, e)
        tile = tl.permute(tile.reshape([BLOCK_M // 8, 4, 8, 4, 2, 2]), (0, 3, 5, 1, 4, 2))
    tile = tile.reshape([BLOCK_M, BLOCK_D])
    row, exists = _rows(query_blocks, block * BLOCK_M + tl.arange(0, BLOCK_M), block, seqlen_q, BLOCK_M)
    column = tl.arange(0, BLOCK_D)[None, :]
    query = (b * seqlen_q + row[:, None]) * heads + h
    tl.store(dq + query * HEAD_DIM + column, tile, mask=exists[:, None] & (column < HEAD_DIM))
