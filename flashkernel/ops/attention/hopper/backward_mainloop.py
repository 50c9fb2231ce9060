"""The consumers of the Hopper backward kernel for heads up to 128 wide.

A work tile is 128 keys of one kv head, 64 for each of two consumer warpgroups. The scores are transposed, so that P^T
and dS^T are in the registers from which the tensor cores read them for dV and dK. Only dS^T goes through shared memory:
dQ sums over the keys of both warpgroups. dQ is added to a float32 accumulator in global memory (dq_accum), in one of
three ways, or left to another kernel (TRAITS.DQ_MODE):

- "atomic": each warpgroup computes half of a block's dQ, one step late, after dS of the next block: neither waits for
  the other's dS. It adds its half by atomics from registers.
- "tma_reduce": likewise, but it leaves its half in shared memory, from where TMA adds it (reduce-add). The registers
  are free at once.
- "dq_warpgroup": a third consumer warpgroup computes dQ^T = K^T dS. It takes registers that only narrow heads and
  blocks of 64 queries leave.
- "dq_kernel": not here. backward_dq_kernel.py computes dQ, in a fixed order; this main loop has four products.

A product is always awaited in the step that issues it; ptxas serializes all of them otherwise.
"""

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.pipeline_gluon import stage_of
from flashkernel.core.gluon import (
    add_tile,
    consumer_release,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    new_barriers,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.backward_common import (
    Barriers,
    atomic_add_dq,
    before_first_block,
    dq_columns,
    first_dq_block,
    issue_dq,
    kv_tiles,
    probabilities,
    query_tiles,
    visible_keys,
)
from flashkernel.ops.attention.hopper.head_split import (
    issue_columns,
    issue_over_columns,
    left_columns,
    num_products,
    scale_accumulator,
    store_columns,
    wait_both,
    wait_columns,
    zero_columns,
)
from flashkernel.ops.attention.hopper.pipeline import next_block, work_tile_at


class Exchange(NamedTuple):
    """Tiles and mbarriers of the consumers among themselves."""

    ds: Any  # dS^T, [2, 128, BLOCK_M]: of this step and of the one before
    dq: Any  # [2 consumers, 64, HEAD_DIM] in float32; DQ_MODE "tma_reduce" only
    ds_full: Any
    ds_empty: Any  # DQ_MODE "dq_warpgroup" only
    k_read: Any  # K of a work tile has been read for the last time


@gluon.jit
def allocate_exchange(dq_accum, buffers, TRAITS: gl.constexpr):
    """Allocates what the consumers pass on to each other, and all mbarriers. Returns (`Barriers`, `Exchange`)."""
    DQ_WARPGROUP: gl.constexpr = TRAITS.DQ_MODE == "dq_warpgroup"
    dtype: gl.constexpr = buffers.k.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TRAITS.BLOCK_N, TRAITS.BLOCK_M], dtype)
    ds_buffers = buffers.k  # not used
    if TRAITS.DQ_MODE != "dq_kernel":
        ds_buffers = gl.allocate_shared_memory(dtype, [2, TRAITS.BLOCK_N, TRAITS.BLOCK_M], DS_LAYOUT)
    dq_buffers = ds_buffers  # not used
    if TRAITS.DQ_MODE == "tma_reduce":
        dq_buffers = gl.allocate_shared_memory(gl.float32, [2, 64, TRAITS.HEAD_DIM], dq_accum.layout)
    kv_full = new_barriers(TRAITS.KV_STAGES, 1)
    kv_done = new_barriers(TRAITS.KV_STAGES, 2)
    q_full = new_barriers(TRAITS.NUM_STAGES, 1)
    q_empty = new_barriers(TRAITS.NUM_STAGES, 256 if TRAITS.BLOCK_M == 64 else 2)
    ds_full = new_barriers(2, 256 if DQ_WARPGROUP else 2)
    ds_empty = new_barriers(2, 128)
    k_read = new_barriers(TRAITS.KV_STAGES, 1 if DQ_WARPGROUP else 2)
    barriers = Barriers(kv_full, kv_done, q_full, q_empty, q_full, q_empty)  # Q and dO come and go together
    return barriers, Exchange(ds_buffers, dq_buffers, ds_full, ds_empty, k_read)


@gluon.jit
def _accumulate_dq(args, dq_block, dq, w: gl.constexpr, COLUMNS: gl.constexpr, TRAITS: gl.constexpr):
    """Add consumer w's half of a block's dQ to dq_accum."""
    if TRAITS.DQ_MODE == "tma_reduce":
        tma.store_wait(0)
        args.exchange.dq.index(w).store(dq)
        fence_async_shared()
        add_tile(args.dq_accum, [dq_block * TRAITS.BLOCK_M + w * 64, 0], args.exchange.dq.index(w))
    else:
        PIECE: gl.constexpr = TRAITS.HEAD_DIM if TRAITS.BLOCK_M == 128 else TRAITS.HEAD_DIM // 2
        atomic_add_dq(args.dq_accum, dq_block * 2 + w, dq, COLUMNS, PIECE)


@gluon.jit
def _arrive(barrier, PER_THREAD: gl.constexpr):
    """A warpgroup arrives, once or (where that is faster) with every thread; the barrier must count accordingly."""
    if PER_THREAD:
        consumer_release(barrier)
    else:
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def _process_work_tile(w: gl.constexpr, args, work_tile, cursor, tile_index, step, kv_stage, MASK: gl.constexpr,
                       TRAITS: gl.constexpr):  # fmt: skip
    """Consumer w: keys 64 w to 64 w + 63 of a work tile's 128, against all its blocks of queries.

    `step` counts the blocks of queries of all work tiles so far: stages and phases go on from one work tile to the
    next. The last dQ of a work tile is computed at its end; its first step finds no dS before it, and multiplies an old
    one for nothing. Returns (step, next work tile, cursor before its first block).
    """
    DQ_WARPGROUP: gl.constexpr = TRAITS.DQ_MODE == "dq_warpgroup"
    DQ_KERNEL: gl.constexpr = TRAITS.DQ_MODE == "dq_kernel"
    # dQ of a warpgroup is [64, DQ_COLUMNS].
    DQ_COLUMNS: gl.constexpr = dq_columns(w, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL, TRAITS.BLOCK_M)
    DK_COLUMNS: gl.constexpr = left_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
    DV_COLUMNS: gl.constexpr = left_columns(TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TRAITS.BLOCK_M, 16])  # [64 keys, BLOCK_M]
    QUERY_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)  # [BLOCK_M]
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK_COLUMNS, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV_COLUMNS, 16])
    buffers, barriers, exchange = args.buffers, args.barriers, args.exchange
    if TRAITS.VARLEN:
        first_key = w * 64
    else:
        first_key = work_tile.tile * TRAITS.BLOCK_N + w * 64
    dtype: gl.constexpr = buffers.q.dtype
    k_tile, v_tile = kv_tiles(buffers, kv_stage, TRAITS)
    own_k = k_tile.slice(w * 64, 64, dim=0)
    own_v = v_tile.slice(w * 64, 64, dim=0)
    dk = zero_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
    dv = zero_columns(TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
    zeros = zero_columns(TRAITS.BLOCK_M, 0)
    dq_zeros = zero_columns(DQ_COLUMNS, 0)
    dq_block_base = first_dq_block(work_tile, args, TRAITS.VARLEN)
    prev_dq_block = gl.to_tensor(-1)  # of the step before
    kv_phase = (tile_index // TRAITS.KV_STAGES) & 1
    mbarrier.wait(barriers.kv_full.index(kv_stage), kv_phase)
    for member in range(args.group_size):
        head = work_tile.head * args.group_size + member
        if member > 0:
            cursor = before_first_block(work_tile, member, args)
        blocks_left, position = cursor
        while blocks_left > 0:
            stage = step % TRAITS.NUM_STAGES
            prev = step & 1  # buffer of dS of the step before; this step's is the other
            position = next_block(position, args.visits.ranges)
            mbarrier.wait(barriers.q_full.index(stage), (step // TRAITS.NUM_STAGES) & 1)
            q_tile, do_tile = query_tiles(buffers, stage, TRAITS)
            # S^T = K Q^T and dP^T = V dO^T; folded, they start from -LSE and -delta.
            s_start, dp_start = zeros, zeros
            if TRAITS.FOLD_LSE:
                lse_start = buffers.neg_lse.index(stage).load(QUERY_LAYOUT)[None, :]  # [1, BLOCK_M]
                s_start = gl.broadcast(lse_start, zeros)[0]
            s_mma = issue_over_columns(own_k, q_tile, s_start, TRAITS.FOLD_LSE, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
            if TRAITS.FOLD_DELTA:
                dp_start = gl.broadcast(buffers.neg_delta.index(stage).load(QUERY_LAYOUT)[None, :], zeros)[0]
            dp_mma = issue_over_columns(
                own_v, do_tile, dp_start, TRAITS.FOLD_DELTA, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL
            )  # fmt: skip
            s = warpgroup_mma_wait(num_products(TRAITS.VALUE_TAIL), deps=[s_mma])
            # P^T = exp(S^T - LSE)
            if TRAITS.FOLD_LSE:
                p = gl.exp2(s * args.scores.scale_log2)
            else:
                neg_lse = buffers.neg_lse.index(stage).load(QUERY_LAYOUT)[None, :]  # [1, BLOCK_M]
                p, capped = probabilities(s, neg_lse, args.scores, TRAITS.SOFTCAP)
            if position.masked != 0:
                first_query = position.block * TRAITS.BLOCK_M
                visible = visible_keys(work_tile, head, first_query, first_key, args.scores, S_LAYOUT, MASK, TRAITS)
                p = gl.where(visible, p, 0.0)
            p_half = p.to(dtype)
            # dV += P^T dO
            dp = warpgroup_mma_wait(0, deps=[dp_mma])
            p_operand = gl.convert_layout(p_half, gl.DotOperandLayout(0, DV_LAYOUT, 2))
            dv_mma = issue_columns(p_operand, do_tile, dv, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
            # dS^T = P^T (dP^T - delta)
            if not TRAITS.FOLD_DELTA:
                dp += buffers.neg_delta.index(stage).load(QUERY_LAYOUT)[None, :]
            if TRAITS.SOFTCAP:
                ds = p * (1 - capped * capped) * dp
            else:
                ds = p * dp
            ds_half = ds.to(dtype)
            if not DQ_KERNEL:
                if DQ_WARPGROUP:
                    mbarrier.wait(exchange.ds_empty.index(1 - prev), (((step + 1) >> 1) & 1) ^ 1)
                else:  # who has released the step before has read dS of the one before that
                    last = step + 2 * TRAITS.NUM_STAGES - 1  # a round further, where it has the same stage and phase
                    mbarrier.wait(barriers.q_empty.index(last % TRAITS.NUM_STAGES), (last // TRAITS.NUM_STAGES) & 1)
                exchange.ds.index(1 - prev).slice(w * 64, 64, dim=0).store(ds_half)
                fence_async_shared()
                _arrive(exchange.ds_full.index(1 - prev), DQ_WARPGROUP)
            # dK += dS^T Q, and dQ = dS K of the step before
            ds_operand = gl.convert_layout(ds_half, gl.DotOperandLayout(0, DK_LAYOUT, 2))
            if DQ_WARPGROUP or DQ_KERNEL:
                dk_mma = issue_columns(ds_operand, q_tile, dk, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
                dv, dk = wait_both(0, dv_mma, dk_mma, TRAITS.VALUE_TAIL, TRAITS.HEAD_TAIL)
            else:
                mbarrier.wait(exchange.ds_full.index(prev), (step >> 1) & 1)
                dq_mma = issue_dq(exchange.ds.index(prev), k_tile, dq_zeros, w, DQ_COLUMNS, TRAITS)
                dk_mma = issue_columns(ds_operand, q_tile, dk, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
                dv, dq = wait_both(num_products(TRAITS.HEAD_TAIL), dv_mma, dq_mma, TRAITS.VALUE_TAIL, 0)
                if prev_dq_block >= 0:
                    _accumulate_dq(args, prev_dq_block, dq, w, DQ_COLUMNS, TRAITS)
                prev_dq_block = dq_block_base + position.block
                dk = wait_columns(0, dk_mma, TRAITS.HEAD_TAIL)
            _arrive(barriers.q_empty.index(stage), TRAITS.BLOCK_M == 64)
            step += 1
            blocks_left -= 1
        dq_block_base += args.q_blocks
    work_tile = work_tile_at(args.work_tiles, tile_index + 1, TRAITS.VARLEN)
    # dK and dV leave through the buffers of K and V; of V each warpgroup has read its own rows only.
    if DQ_WARPGROUP or DQ_KERNEL:
        store_columns(own_v, dv, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
        cursor = before_first_block(work_tile, 0, args)
    else:
        mbarrier.wait(exchange.ds_full.index(step & 1), (step >> 1) & 1)
        dq_mma = issue_dq(exchange.ds.index(step & 1), k_tile, dq_zeros, w, DQ_COLUMNS, TRAITS)
        store_columns(own_v, dv, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
        dq = warpgroup_mma_wait(0, deps=[dq_mma])
        mbarrier.arrive(exchange.k_read.index(kv_stage), count=1)
        cursor = before_first_block(work_tile, 0, args)
        if prev_dq_block >= 0:
            _accumulate_dq(args, prev_dq_block, dq, w, DQ_COLUMNS, TRAITS)
    if not DQ_KERNEL:  # else a warpgroup has read its own rows of K only
        mbarrier.wait(exchange.k_read.index(kv_stage), kv_phase)
    dk = scale_accumulator(dk, args.scores.softmax_scale, TRAITS.HEAD_TAIL)
    store_columns(own_k, dk, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
    fence_async_shared()
    mbarrier.arrive(barriers.kv_done.index(kv_stage), count=1)
    return step, work_tile, cursor


@gluon.jit
def consume(w: gl.constexpr, args, MASK: gl.constexpr, TRAITS: gl.constexpr):
    """Consumer warpgroup w: dK and dV of its 64 keys, and its half of dQ.

    With blocks of 64 queries there is code for each stage of K and V, at addresses that the compiler knows: the loop
    over steps is a tenth shorter. Blocks of 128 lack the registers that this takes.
    """
    if TRAITS.DQ_MODE != "dq_kernel":  # the very first step finds a dS before it
        _arrive(args.exchange.ds_full.index(0), TRAITS.DQ_MODE == "dq_warpgroup")
    if TRAITS.PDL:
        gdc_wait()  # the preprocess kernel must have zeroed dq_accum
    COPIES: gl.constexpr = TRAITS.KV_STAGES if TRAITS.BLOCK_M == 64 else 1
    step = 0
    tile_index = 0
    work_tile = work_tile_at(args.work_tiles, 0, TRAITS.VARLEN)
    cursor = before_first_block(work_tile, 0, args)
    while work_tile.tile >= 0:
        for copy in gl.static_range(COPIES):
            if work_tile.tile >= 0:
                if COPIES == TRAITS.KV_STAGES:
                    kv_stage = copy
                else:
                    kv_stage = tile_index % TRAITS.KV_STAGES
                step, work_tile, cursor = _process_work_tile(
                    w, args, work_tile, cursor, tile_index, step, kv_stage, MASK, TRAITS
                )  # fmt: skip
                tile_index += 1
    if TRAITS.DQ_MODE == "tma_reduce":
        tma.store_wait(0)


@gluon.jit
def consume_dq(args, TRAITS: gl.constexpr):
    """The third consumer warpgroup ("dq_warpgroup"): dQ^T = K^T dS of every step, with K^T in registers for a whole
    work tile."""
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TRAITS.BLOCK_M, 16])  # [HEAD_DIM, BLOCK_M]
    zeros = gl.full([TRAITS.HEAD_DIM, TRAITS.BLOCK_M], 0.0, gl.float32, DQ_LAYOUT)
    buffers, barriers, exchange = args.buffers, args.barriers, args.exchange
    consumer_release(exchange.ds_empty.index(0))  # the very first step finds a dS before it, read
    if TRAITS.PDL:
        gdc_wait()  # the preprocess kernel must have zeroed dq_accum
    step = 0
    tile_index = 0
    work_tile = work_tile_at(args.work_tiles, 0, TRAITS.VARLEN)
    while work_tile.tile >= 0:
        kv_stage, kv_phase = stage_of(tile_index, TRAITS.KV_STAGES)
        dq_block_base = first_dq_block(work_tile, args, TRAITS.VARLEN)
        mbarrier.wait(barriers.kv_full.index(kv_stage), kv_phase)
        k_tile, _ = kv_tiles(buffers, kv_stage, TRAITS)
        k_operand = k_tile.permute((1, 0)).load(gl.DotOperandLayout(0, DQ_LAYOUT, 2))
        for member in range(args.group_size):
            blocks_left, position = before_first_block(work_tile, member, args)
            while blocks_left > 0:
                step += 1
                position = next_block(position, args.visits.ranges)
                mbarrier.wait(exchange.ds_full.index(step & 1), (step >> 1) & 1)
                dq_mma = warpgroup_mma(k_operand, exchange.ds.index(step & 1), zeros, use_acc=False, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq_mma])
                consumer_release(exchange.ds_empty.index(step & 1))
                atomic_add_dq(args.dq_accum, dq_block_base + position.block, dq, TRAITS.BLOCK_M, TRAITS.BLOCK_M)
                blocks_left -= 1
            dq_block_base += args.q_blocks
        mbarrier.arrive(exchange.k_read.index(kv_stage), count=1)
        tile_index += 1
        work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
