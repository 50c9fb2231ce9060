"""The consumers of the Hopper backward kernel for heads wider than 128.

A work tile is 64 keys of one kv head, whose dK and dV of 256 columns fill the accumulators of a warpgroup each. Both
consumer warpgroups work on the same 64 keys and the same blocks of 64 queries, and share the products:

- the dV warpgroup computes S^T = K Q^T and P^T, passes P^T on, and accumulates dV += P^T dO;
- the dK warpgroup computes dP^T = V dO^T, takes P^T, passes dS^T on, and accumulates dK += dS^T Q.

P^T is passed on in float32, from each thread to the same thread of the other warpgroup: nothing is rounded, and there
are no bank conflicts. Each warpgroup computes half of the columns of dQ = dS K and adds them to a float32 accumulator
in global memory (dq_accum) by atomics. The dV warpgroup computes its half one step late, so that it never waits for the
other: while one computes exponentials, the other has products under way. With DQ_MODE "dq_kernel" dQ is computed by
backward_dq_kernel.py, and dS^T stays in registers.
"""

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.pipeline_gluon import stage_of
from flashkernel.core.gluon import (
    consumer_release,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    new_barriers,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.backward_common import (
    Barriers,
    atomic_add_dq,
    before_first_block,
    dq_columns,
    first_dq_block,
    in_register_order,
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
    wait_columns,
    zero_columns,
)
from flashkernel.ops.attention.hopper.pipeline import next_block, work_tile_at


class Exchange(NamedTuple):
    """Tiles and mbarriers of the consumers among themselves."""

    p: Any  # P^T in float32 (times the derivative of the softcap), [1, 64 * 64] `in_register_order`
    ds: Any  # dS^T, [2, 64, 64]: of this step and of the one before
    p_full: Any
    ds_full: Any
    k_read: Any  # the dV warpgroup has read K of a work tile for the last time


@gluon.jit
def allocate_wide_exchange(descriptors, buffers, TRAITS: gl.constexpr):
    """Allocates what the consumers pass on to each other, and all mbarriers. Returns (`Barriers`, `Exchange`)."""
    p_buffer = gl.allocate_shared_memory(gl.float32, [1, 64 * 64], descriptors.lse_delta.layout)
    dtype: gl.constexpr = buffers.k.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    ds_buffers = buffers.k  # not used
    if TRAITS.DQ_MODE != "dq_kernel":
        ds_buffers = gl.allocate_shared_memory(dtype, [2, 64, 64], DS_LAYOUT)
    kv_full = new_barriers(1, 1)
    kv_done = new_barriers(1, 2)
    q_full = new_barriers(TRAITS.NUM_STAGES, 1)
    q_empty = new_barriers(TRAITS.NUM_STAGES, 128)
    do_full = new_barriers(TRAITS.NUM_STAGES, 1)
    do_empty = new_barriers(TRAITS.NUM_STAGES, 256)
    p_full = new_barriers(1, 1)
    ds_full = new_barriers(2, 1)
    k_read = new_barriers(1, 1)
    barriers = Barriers(kv_full, kv_done, q_full, q_empty, do_full, do_empty)
    return barriers, Exchange(p_buffer, ds_buffers, p_full, ds_full, k_read)


@gluon.jit
def _from_register_order(flat, S_LAYOUT: gl.constexpr):
    """[64, 64], the inverse of `in_register_order`: a thread gets what the same thread of the other warpgroup had."""
    rows = flat.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(rows.reshape([64, 64]), S_LAYOUT)


@gluon.jit
def consume_dv(args, MASK: gl.constexpr, TRAITS: gl.constexpr):
    """The dV warpgroup: P, dV, and the left half of dQ.

    The last dQ of a work tile is computed at its end; its first step finds no dS before it, and multiplies an old one
    for nothing.
    """
    DQ_KERNEL: gl.constexpr = TRAITS.DQ_MODE == "dq_kernel"
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64 keys, 64 queries]
    DV_COLUMNS: gl.constexpr = left_columns(TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV_COLUMNS, 16])
    DQ_COLUMNS: gl.constexpr = TRAITS.HEAD_DIM // 2
    buffers, barriers, exchange = args.buffers, args.barriers, args.exchange
    dtype: gl.constexpr = buffers.q.dtype
    k_tile, v_tile = kv_tiles(buffers, 0, TRAITS)
    zeros = zero_columns(64, 0)
    dq_zeros = zero_columns(DQ_COLUMNS, 0)
    if TRAITS.PDL:
        gdc_wait()  # the preprocess kernel must have zeroed dq_accum
    step = 0
    tile_index = 0
    work_tile = work_tile_at(args.work_tiles, 0, TRAITS.VARLEN)
    while work_tile.tile >= 0:
        if TRAITS.VARLEN:
            first_key = 0
        else:
            first_key = work_tile.tile * 64
        dv = zero_columns(TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
        dq_block_base = first_dq_block(work_tile, args, TRAITS.VARLEN)
        prev_dq_block = gl.to_tensor(-1)  # of the step before
        mbarrier.wait(barriers.kv_full.index(0), tile_index & 1)
        for member in range(args.group_size):
            blocks_left, position = before_first_block(work_tile, member, args)
            while blocks_left > 0:
                stage, phase = stage_of(step, TRAITS.NUM_STAGES)
                prev = (step + 1) & 1  # buffer of dS of the step before
                position = next_block(position, args.visits.ranges)
                mbarrier.wait(barriers.q_full.index(stage), phase)
                q_tile, do_tile = query_tiles(buffers, stage, TRAITS)
                # S^T = K Q^T, P^T = exp(S^T - LSE)
                s_mma = issue_over_columns(k_tile, q_tile, zeros, False, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
                neg_lse = buffers.neg_lse.index(stage).load(gl.SliceLayout(0, S_LAYOUT))[None, :]  # [1, 64]
                s = warpgroup_mma_wait(0, deps=[s_mma])
                p, capped = probabilities(s, neg_lse, args.scores, TRAITS.SOFTCAP)
                if position.masked != 0:
                    head = work_tile.head * args.group_size + member
                    visible = visible_keys(
                        work_tile, head, position.block * 64, first_key, args.scores, S_LAYOUT, MASK, TRAITS
                    )  # fmt: skip
                    p = gl.where(visible, p, 0.0)
                p_operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, DV_LAYOUT, 2))
                # The other warpgroup has read P of the step before when it has written dS.
                mbarrier.wait(exchange.ds_full.index(prev), ((step - 1) >> 1) & 1)
                if TRAITS.SOFTCAP:
                    exchange.p.index(0).store(in_register_order(p * (1 - capped * capped), 64))
                else:
                    exchange.p.index(0).store(in_register_order(p, 64))
                mbarrier.arrive(exchange.p_full.index(0), count=1)
                # dV += P^T dO, and the left half of dQ = dS K of the step before
                mbarrier.wait(barriers.do_full.index(stage), phase)
                if not DQ_KERNEL:
                    dq_mma = issue_dq(exchange.ds.index(prev), k_tile, dq_zeros, 0, DQ_COLUMNS, TRAITS)
                dv_mma = issue_columns(p_operand, do_tile, dv, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
                if not DQ_KERNEL:
                    dq = warpgroup_mma_wait(num_products(TRAITS.VALUE_TAIL), deps=[dq_mma])
                    if prev_dq_block >= 0:
                        atomic_add_dq(args.dq_accum, prev_dq_block * 2, dq, DQ_COLUMNS, DQ_COLUMNS)
                    prev_dq_block = dq_block_base + position.block
                dv = wait_columns(0, dv_mma, TRAITS.VALUE_TAIL)
                consumer_release(barriers.do_empty.index(stage))
                step += 1
                blocks_left -= 1
            dq_block_base += args.q_blocks
        last = (step + 1) & 1
        mbarrier.wait(exchange.ds_full.index(last), ((step - 1) >> 1) & 1)
        if not DQ_KERNEL:
            dq_mma = issue_dq(exchange.ds.index(last), k_tile, dq_zeros, 0, DQ_COLUMNS, TRAITS)
        work_tile = work_tile_at(args.work_tiles, tile_index + 1, TRAITS.VARLEN)
        # The last dS is there: V has been read for the last time.
        store_columns(v_tile, dv, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
        if not DQ_KERNEL:
            dq = warpgroup_mma_wait(0, deps=[dq_mma])
        mbarrier.arrive(exchange.k_read.index(0), count=1)
        fence_async_shared()
        mbarrier.arrive(barriers.kv_done.index(0), count=1)
        if not DQ_KERNEL:  # noqa: SIM102  decided by the compiler, unlike the next
            if prev_dq_block >= 0:
                atomic_add_dq(args.dq_accum, prev_dq_block * 2, dq, DQ_COLUMNS, DQ_COLUMNS)
        tile_index += 1


@gluon.jit
def consume_dk(args, TRAITS: gl.constexpr):
    """The dK warpgroup: dS, dK, and the right half of dQ."""
    DQ_KERNEL: gl.constexpr = TRAITS.DQ_MODE == "dq_kernel"
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64 keys, 64 queries]
    DK_COLUMNS: gl.constexpr = left_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK_COLUMNS, 16])
    DQ_COLUMNS: gl.constexpr = dq_columns(1, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL, 64)
    buffers, barriers, exchange = args.buffers, args.barriers, args.exchange
    dtype: gl.constexpr = buffers.q.dtype
    k_tile, v_tile = kv_tiles(buffers, 0, TRAITS)
    zeros = zero_columns(64, 0)
    dq_zeros = zero_columns(DQ_COLUMNS, 0)
    flat_zeros = in_register_order(zeros, 64)
    if TRAITS.PDL:
        gdc_wait()  # the preprocess kernel must have zeroed dq_accum
    step = 0
    tile_index = 0
    work_tile = work_tile_at(args.work_tiles, 0, TRAITS.VARLEN)
    while work_tile.tile >= 0:
        dk = zero_columns(TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
        dq_block_base = first_dq_block(work_tile, args, TRAITS.VARLEN)
        mbarrier.wait(barriers.kv_full.index(0), tile_index & 1)
        for member in range(args.group_size):
            blocks_left, position = before_first_block(work_tile, member, args)
            while blocks_left > 0:
                stage, phase = stage_of(step, TRAITS.NUM_STAGES)
                current = step & 1  # buffer of dS
                position = next_block(position, args.visits.ranges)
                mbarrier.wait(barriers.do_full.index(stage), phase)
                q_tile, do_tile = query_tiles(buffers, stage, TRAITS)
                # dP^T = V dO^T, dS^T = P^T (dP^T - delta)
                dp_mma = issue_over_columns(v_tile, do_tile, zeros, False, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
                neg_delta = buffers.neg_delta.index(stage).load(gl.SliceLayout(0, S_LAYOUT))[None, :]  # [1, 64]
                dp = warpgroup_mma_wait(0, deps=[dp_mma])
                mbarrier.wait(exchange.p_full.index(0), step & 1)
                p = _from_register_order(exchange.p.index(0).load(flat_zeros.type.layout), S_LAYOUT)
                ds = (p * (dp + neg_delta)).to(dtype)
                ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, DK_LAYOUT, 2))
                if not DQ_KERNEL:
                    exchange.ds.index(current).store(ds)
                    fence_async_shared()
                mbarrier.arrive(exchange.ds_full.index(current), count=1)
                consumer_release(barriers.do_empty.index(stage))
                # dK += dS^T Q, and the right half of dQ = dS K
                mbarrier.wait(barriers.q_full.index(stage), phase)
                if not DQ_KERNEL:
                    mbarrier.wait(exchange.ds_full.index(current), (step >> 1) & 1)
                    dq_mma = issue_dq(exchange.ds.index(current), k_tile, dq_zeros, 1, DQ_COLUMNS, TRAITS)
                dk_mma = issue_columns(ds_operand, q_tile, dk, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
                if not DQ_KERNEL:
                    dq = warpgroup_mma_wait(num_products(TRAITS.HEAD_TAIL), deps=[dq_mma])
                    dq_half = (dq_block_base + position.block) * 2 + 1
                    atomic_add_dq(args.dq_accum, dq_half, dq, DQ_COLUMNS, TRAITS.HEAD_DIM // 2)
                dk = wait_columns(0, dk_mma, TRAITS.HEAD_TAIL)
                consumer_release(barriers.q_empty.index(stage))
                step += 1
                blocks_left -= 1
            dq_block_base += args.q_blocks
        work_tile = work_tile_at(args.work_tiles, tile_index + 1, TRAITS.VARLEN)
        mbarrier.wait(exchange.k_read.index(0), tile_index & 1)
        dk = scale_accumulator(dk, args.scores.softmax_scale, TRAITS.HEAD_TAIL)
        store_columns(k_tile, dk, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)
        fence_async_shared()
        mbarrier.arrive(barriers.kv_done.index(0), count=1)
        tile_index += 1
