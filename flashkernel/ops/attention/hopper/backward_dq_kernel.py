"""Attention backward on Hopper: dQ by a kernel of its own, in a fixed order (dq_mode "dq_kernel").

A program takes tiles of queries, as in the forward pass, and iterates over the K blocks that the mask leaves:

    S = Q K^T,  dP = dO V^T,  P = exp(S - LSE),  dS = P (dP - delta),  dQ += dS K

A warpgroup sums dQ of its 64 rows in the order of the K blocks: nothing is added by atomics, and gradients are
bit-equal on repeat. The main kernel computes S and dP as well, for dK and dV: together seven products instead of five.
There is no float32 accumulator of dQ in global memory, so that nothing has to be zeroed before and rounded behind.

Warp roles, the K/V pipeline and the schedule are those of the forward kernel (warp_roles.py). dO is loaded beside Q,
and dQ leaves through the buffer of Q. Intra-warpgroup overlap: S and dP of the next K block are issued before
dQ += dS K of this one, and dS is computed while the tensor cores work. V of a block is released after dP, K after dQ.
"""

from flashkernel.blocks.pipeline_gluon import next_stage
from flashkernel.blocks.softmax_triton import LOG2E
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.backward_common import probabilities
from flashkernel.ops.attention.hopper.forward_kernel import SIZES
from flashkernel.ops.attention.hopper.head_split import (
    issue_columns,
    issue_over_columns,
    left_columns,
    num_products,
    scale_accumulator,
    store_columns,
    wait_columns,
    zero_columns,
)
from flashkernel.ops.attention.hopper.pipeline import (
    advance,
    consumer_release_k,
    consumer_release_v,
    first_block,
    first_query,
    first_row,
    range_counts_of,
    sequence_of,
    skip_blocks,
    table_row,
    work_tile_at,
)
from flashkernel.ops.attention.hopper.softmax import ScoreParams, apply_mask
from flashkernel.ops.attention.hopper.warp_roles import (
    Buffers,
    TableSizes,
    issue_s,
    q_slot,
    query_coords,
    run_warp_roles,
)


@gluon.jit
def _load_rows(args, work_tile, w: gl.constexpr, ROWS: gl.constexpr, TRAITS: gl.constexpr):
    """Returns (-LSE in units of log2, delta) of a consumer's rows, [64, 1] each. A row that does not exist or sees no
    key has an LSE of +inf, so that P = 0."""
    BLOCK_M: gl.constexpr = 64 // TRAITS.PACK_GQA
    row = gl.arange(0, 64, ROWS)
    head = work_tile.head + row % TRAITS.PACK_GQA  # [64]
    if TRAITS.VARLEN:  # rows of the packed tensor
        sequence = sequence_of(work_tile, args.work_tiles)
        query = sequence.q_start + first_row(sequence, w, BLOCK_M) + row // TRAITS.PACK_GQA  # [64]
        exists = query < sequence.q_end
        batch_head = head.to(gl.int64)
    else:
        first = first_query(
            work_tile, w, args.scores.seqlen_q, TRAITS.NUM_CONSUMERS, BLOCK_M, TRAITS.PAD_FRONT
        )  # fmt: skip
        query = first + row // TRAITS.PACK_GQA  # [64]
        exists = query < args.scores.seqlen_q
        batch_head = work_tile.batch.to(gl.int64) * args.heads + head
    offset = batch_head * args.scores.seqlen_q + query
    lse = gl.load(args.lse + offset, mask=exists, other=float("inf"))
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    delta = gl.load(args.delta + offset, mask=exists, other=0.0)
    return (lse * -LOG2E)[:, None], delta[:, None]


@gluon.jit
def _masked_probabilities(s, neg_lse, block, masked, work_tile, args, w: gl.constexpr, MASK: gl.constexpr,
                          TRAITS: gl.constexpr):  # fmt: skip
    """Returns (P [64, BLOCK_N] with 0 where the mask hides a key, tanh of the capped scores)."""
    p, capped = probabilities(s, neg_lse, args.scores, TRAITS.SOFTCAP)
    if masked != 0:
        key = gl.arange(0, TRAITS.BLOCK_N, gl.SliceLayout(0, p.type.layout))[None, :]
        p = apply_mask(p, key, block * TRAITS.BLOCK_N, work_tile, args.scores, w, MASK, TRAITS, 0.0)
    return p, capped


@gluon.jit
def _score_gradient(p, capped, dp, delta, TRAITS: gl.constexpr):
    """Returns dS = P (dP - delta), [64, BLOCK_N], times the derivative of the softcap."""
    ds = p * (dp - delta)
    if TRAITS.SOFTCAP:
        ds = ds * (1 - capped * capped)
    return ds


@gluon.jit
def _issue_dp(do_tile, v_buffers, stage, zeros, TRAITS: gl.constexpr):
    """Issues dP = dO V^T, [64, BLOCK_N]."""
    v_tile = v_buffers.index(stage).reshape([TRAITS.BLOCK_N, TRAITS.VALUE_DIM])
    return issue_over_columns(do_tile, v_tile, zeros, False, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)


@gluon.jit
def _process_work_tiles(w: gl.constexpr, args, state, num_tiles, MASK: gl.constexpr, TRAITS: gl.constexpr,
                        RETRY: gl.constexpr):  # fmt: skip
    """Consumer `w`: dQ of 64 rows of all work tiles. `state` is the position in the K/V ring; returns it and the number
    of work tiles at the end. (RETRY is the forward kernel's, and False here.)"""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TRAITS.BLOCK_N, 16])
    DP_PRODUCTS: gl.constexpr = num_products(TRAITS.VALUE_TAIL)
    DQ_PRODUCTS: gl.constexpr = num_products(TRAITS.HEAD_TAIL)
    DQ_COLUMNS: gl.constexpr = left_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    buffers, barriers, tables = args.buffers, args.barriers, args.tables
    dtype: gl.constexpr = buffers.k.dtype
    zeros = zero_columns(TRAITS.BLOCK_N, 0)
    work_tile = work_tile_at(args.work_tiles, 0, TRAITS.VARLEN)
    while work_tile.tile >= 0:
        slot, phase = q_slot(num_tiles, w, TRAITS)
        q_tile = buffers.q.index(slot).reshape([64, TRAITS.HEAD_DIM])
        do_tile = buffers.o.index(slot).reshape([64, TRAITS.VALUE_DIM])
        row = table_row(work_tile, tables, w, TRAITS.NUM_CONSUMERS)
        skipped, cursor = first_block(row, tables)
        num_visited = cursor.blocks_left + 1
        neg_lse, delta = _load_rows(args, work_tile, w, gl.SliceLayout(1, S_LAYOUT), TRAITS)
        mbarrier.wait(barriers.q_full.index(slot), phase)
        state = skip_blocks(barriers, state, skipped, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
        dq = zero_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
        ds_operand = gl.convert_layout(zeros.to(dtype), DS_LAYOUT)
        if num_visited > 0:  # prologue: dS of the first K block
            stage, phase = state
            mbarrier.wait(barriers.k_full.index(stage), phase)
            s_issued = issue_s(q_tile, buffers.k, stage, zeros, TRAITS)
            mbarrier.wait(barriers.v_full.index(stage), phase)
            dp_issued = _issue_dp(do_tile, buffers.v, stage, zeros, TRAITS)
            block, masked = cursor.position.block, cursor.position.masked
            cursor = advance(cursor, tables)
            s = warpgroup_mma_wait(DP_PRODUCTS, deps=[s_issued])
            p, capped = _masked_probabilities(s, neg_lse, block, masked, work_tile, args, w, MASK, TRAITS)
            dp = warpgroup_mma_wait(0, deps=[dp_issued])
            consumer_release_v(stage, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
            ds = _score_gradient(p, capped, dp, delta, TRAITS)
            ds_operand = gl.convert_layout(ds.to(dtype), DS_LAYOUT)
        while cursor.blocks_left >= 0:  # S and dP of a K block, then dQ += dS K of the one before
            k_stage = state.stage
            state = next_stage(state, TRAITS.NUM_STAGES)
            stage, phase = state
            mbarrier.wait(barriers.k_full.index(stage), phase)
            s_issued = issue_s(q_tile, buffers.k, stage, zeros, TRAITS)
            mbarrier.wait(barriers.v_full.index(stage), phase)
            dp_issued = _issue_dp(do_tile, buffers.v, stage, zeros, TRAITS)
            k_tile = buffers.k.index(k_stage).reshape([TRAITS.BLOCK_N, TRAITS.HEAD_DIM])
            dq_issued = issue_columns(ds_operand, k_tile, dq, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
            block, masked = cursor.position.block, cursor.position.masked
            cursor = advance(cursor, tables)
            s = warpgroup_mma_wait(DP_PRODUCTS + DQ_PRODUCTS, deps=[s_issued])
            p, capped = _masked_probabilities(s, neg_lse, block, masked, work_tile, args, w, MASK, TRAITS)
            dp = warpgroup_mma_wait(DQ_PRODUCTS, deps=[dp_issued])
            consumer_release_v(stage, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
            ds = _score_gradient(p, capped, dp, delta, TRAITS)
            dq = wait_columns(0, dq_issued, TRAITS.HEAD_TAIL)
            consumer_release_k(k_stage, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
            ds_operand = gl.convert_layout(ds.to(dtype), DS_LAYOUT)
        if num_visited > 0:
            k_tile = buffers.k.index(state.stage).reshape([TRAITS.BLOCK_N, TRAITS.HEAD_DIM])
            dq_issued = issue_columns(ds_operand, k_tile, dq, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
            skipped = gl.load(range_counts_of(row, tables) + 2)
            dq = wait_columns(0, dq_issued, TRAITS.HEAD_TAIL)
            consumer_release_k(state.stage, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
            state = next_stage(state, TRAITS.NUM_STAGES)
            state = skip_blocks(barriers, state, skipped, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)
        # Epilogue: dQ leaves through the buffer of Q, and only then may the next Q and dO come.
        dq = scale_accumulator(dq, args.scores.softmax_scale, TRAITS.HEAD_TAIL)
        store_columns(q_tile, dq, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
        fence_async_shared()
        coords = query_coords(work_tile, args.work_tiles, args.scores.seqlen_q, w, TRAITS)
        store_tile(args.o, coords, buffers.q.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(slot), count=1)
        num_tiles += 1
        work_tile = work_tile_at(args.work_tiles, num_tiles, TRAITS.VARLEN)
    return state, num_tiles


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def attention_backward_dq(
    lse, delta, q, k, v, do, dq, mask_tables, tables, max_ranges, max_loads, batch_stride, head_stride, max_work_tiles,
    heads, group_size, seqlen_q, seqlen_k, scales, MASK: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """dQ. Tensors from q to dq are TMA descriptors; lse and delta are float32 [batch, heads, seqlen_q]; tables are
    `TileTables`, scales `Scales`."""
    q_buffers = gl.allocate_shared_memory(q.dtype, [TRAITS.NUM_CONSUMERS] + q.block_shape, q.layout)
    do_buffers = gl.allocate_shared_memory(do.dtype, [TRAITS.NUM_CONSUMERS] + do.block_shape, do.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [TRAITS.NUM_STAGES] + k.block_shape, k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [TRAITS.NUM_STAGES] + v.block_shape, v.layout)
    buffers = Buffers(q_buffers, k_buffers, v_buffers, do_buffers)
    sizes = TableSizes(max_ranges, max_loads, batch_stride, head_stride, max_work_tiles)
    scores = ScoreParams(seqlen_q, seqlen_k, scales.scale_log2, scales.softmax_scale, scales.softcap, mask_tables)
    run_warp_roles(
        q, k, v, dq, lse, None, buffers, None, tables, sizes, heads, group_size, scores, None,
        _process_work_tiles, MASK, TRAITS, do, delta,
    )  # fmt: skip
