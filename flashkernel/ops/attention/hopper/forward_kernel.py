"""Attention forward on Hopper in the manner of FlashAttention-3: a producer warp and two to four consumer warpgroups.

1. A program is persistent. It takes work tiles from its schedule (tile_scheduler.py): 64 rows of queries for each
   consumer warpgroup, against the K blocks that the mask leaves (block_ranges.py).
2. The producer warp loads Q, K and V tiles by TMA and runs NUM_STAGES K blocks ahead (warp_roles.py).
3. A consumer computes S = Q K^T and O += P V by WGMMA. Intra-warpgroup overlap: it issues S of the next K block before
   O += P V of this one, and computes the exponentials of P while the tensor cores work (`_mma_loop`).
4. OVERLAP: a consumer also issues the first S of its next work tile before the last O += P V of this one, so that the
   epilogue (`finalize`, `store_o`) runs beside matrix products.
5. Consumers release K and V stages through named barriers. While the exponentials of one consumer are computed,
   another one's products run: the hardware interleaves them without explicit ping-pong barriers.

FIXED_MAX: a work tile uses the row max of its first K block for all its K blocks and never rescales O. Work tiles whose
row sums leave [MIN_ROW_SUM, MAX_ROW_SUM] are flagged and recomputed with the online softmax (overflow_retry.py).

PACK_GQA: a work tile has the queries of PACK_GQA heads that share a kv head; what a row sees must not depend on its
head.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.pipeline_gluon import join_columns, next_stage, split_columns
from flashkernel.core.gluon import (
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.head_split import (
    issue_columns,
    left_columns,
    num_products,
    scale_rows,
    wait_columns,
    zero_columns,
)
from flashkernel.ops.attention.hopper.overflow_retry import MIN_ROW_SUM, next_work_tile
from flashkernel.ops.attention.hopper.pipeline import (
    advance,
    blocks_between,
    consumer_release_k,
    consumer_release_v,
    first_block,
    range_counts_of,
    skip_blocks,
    table_row,
    work_tile_at,
)
from flashkernel.ops.attention.hopper.softmax import (
    ScoreParams,
    exp2_scores,
    finalize,
    first_softmax,
    masked_scores,
    online_softmax,
    partial_row_sums,
)
from flashkernel.ops.attention.hopper.warp_roles import (
    Buffers,
    TableSizes,
    issue_s,
    q_slot,
    run_warp_roles,
    store_o,
)


class ForwardTraits(NamedTuple):
    """What the kernel is compiled for."""

    NUM_CONSUMERS: int  # warpgroups of 64 rows each
    NUM_STAGES: int  # of K and V
    Q_STAGES: int  # work tiles whose Q is in shared memory: 2 with OVERLAP, else 1
    BLOCK_N: int  # keys of a K block
    HEAD_DIM: int  # padded to 64, 128 or 256, as is VALUE_DIM
    VALUE_DIM: int
    PACK_GQA: int  # heads in a work tile
    PAD_FRONT: bool  # which consumers have no queries if those do not divide evenly (`first_query`)
    OVERLAP: bool  # the next work tile's first S is issued before this one's last O += P V
    FIXED_MAX: bool  # optimistic softmax instead of the online softmax
    OVERFLOW_RETRY: bool  # equal to FIXED_MAX
    REUSE_Q_FOR_O: bool  # O is staged in the buffer of Q
    SOFTCAP: bool
    SCALE_FIRST: bool  # S is scaled before the row max: with a softcap or a scale <= 0
    MASK_RELATIVE: bool  # the mask depends on q - k only
    MASK_BOUNDED: bool  # the mask is False for keys >= seqlen_k
    HAS_SINKS: bool
    CONSUMER_REGISTERS: int  # per thread, as PRODUCER_REGISTERS
    PRODUCER_REGISTERS: int
    HEAD_TAIL: int = 0  # columns behind the first half of HEAD_DIM that are multiplied; 0 for all (head_split.py)
    VALUE_TAIL: int = 0
    Q_IN_REGISTERS: bool = False  # the second half of Q's columns, as an operand of S = Q K^T
    VARLEN: bool = False  # packed sequences: work tiles and descriptors follow them
    FP8: bool = False  # layouts of K and V (`warp_roles._load_kv`)


class RowState(NamedTuple):
    """Of a consumer's 64 rows: P of the last K block as the operand of P V [64, BLOCK_N], m [64] and l [64, 8]."""

    p: Any
    row_max: Any
    row_sum: Any


@gluon.jit
def _load_q(q_tile, TRAITS: gl.constexpr):
    """Returns (Q of a work tile in shared memory, its second half of columns in registers); without Q_IN_REGISTERS, the
    tile twice."""
    if TRAITS.Q_IN_REGISTERS:
        HALF: gl.constexpr = TRAITS.HEAD_DIM // 2
        S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TRAITS.BLOCK_N, 16])
        q = q_tile, q_tile.slice(HALF, HALF, dim=1).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        q = q_tile, q_tile
    return q


@gluon.jit
def _issue_s(q, k_buffers, stage, zeros, TRAITS: gl.constexpr):
    """Issues S = Q K^T, [64, BLOCK_N]; with Q_IN_REGISTERS as two products, of which the second one reads K alone from
    shared memory."""
    q_tile, q_right = q
    if TRAITS.Q_IN_REGISTERS:
        HALF: gl.constexpr = TRAITS.HEAD_DIM // 2
        k_tile = k_buffers.index(stage).reshape([TRAITS.BLOCK_N, TRAITS.HEAD_DIM])
        left_k = k_tile.slice(0, HALF, dim=1).permute((1, 0))
        left = warpgroup_mma(q_tile.slice(0, HALF, dim=1), left_k, zeros, use_acc=False, is_async=True)
        right_k = k_tile.slice(HALF, HALF, dim=1).permute((1, 0))
        issued = warpgroup_mma(q_right, right_k, left, is_async=True)
    else:
        issued = issue_s(q_tile, k_buffers, stage, zeros, TRAITS)
    return issued


@gluon.jit
def _mma_loop(args, work_tile, q, state, cursor, rows, w: gl.constexpr, MASK: gl.constexpr,
              FIXED_MAX: gl.constexpr, TRAITS: gl.constexpr):  # fmt: skip
    """Iterates over a work tile's K blocks: from P of its first block to P of its last one, whose O += P V is left to
    the caller. K of the second block must have been awaited.

    A step issues S of K block j, then O += P V of block j - 1; computes P of block j while O is accumulated; and waits
    for O. With two consumers and FIXED_MAX the last quarter of P is computed after that wait: the other quarters are
    converted to 16 bits meanwhile. (With more consumers, another one always has exponentials to compute.)

    `state` is the first block's position in the K/V ring. Returns (O [64, VALUE_DIM], rows, the last block's position).
    """
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    VALUE_DIM: gl.constexpr = TRAITS.VALUE_DIM
    VALUE_TAIL: gl.constexpr = TRAITS.VALUE_TAIL
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_COLUMNS: gl.constexpr = left_columns(VALUE_DIM, VALUE_TAIL)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    SPLIT_P: gl.constexpr = NUM_CONSUMERS == 2
    buffers, barriers = args.buffers, args.barriers
    scale_log2 = args.scores.scale_log2
    p_operand, row_max, row_sum = rows
    SUM_LAYOUT: gl.constexpr = row_sum.type.layout
    dtype: gl.constexpr = buffers.k.dtype
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    o = zero_columns(VALUE_DIM, VALUE_TAIL)
    more = cursor.blocks_left >= 0
    following = next_stage(state, NUM_STAGES)
    while more:
        v_stage, v_phase = state
        state = following
        stage = state.stage
        following = next_stage(state, NUM_STAGES)
        s_issued = _issue_s(q, buffers.k, stage, zeros, TRAITS)
        mbarrier.wait(barriers.v_full.index(v_stage), v_phase)
        v_tile = buffers.v.index(v_stage).reshape([BLOCK_N, VALUE_DIM])
        o_issued = issue_columns(p_operand, v_tile, o, VALUE_DIM, VALUE_TAIL)
        block, masked = cursor.position.block, cursor.position.masked
        cursor = advance(cursor, args.tables)
        s = warpgroup_mma_wait(num_products(VALUE_TAIL), deps=[s_issued])
        consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
        s = masked_scores(s, block, masked, work_tile, args.scores, w, MASK, TRAITS)
        if not FIXED_MAX:
            p, rescale, row_max = online_softmax(s, row_max, scale_log2)
            l_scale = gl.convert_layout(rescale, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
            row_sum = row_sum * l_scale + partial_row_sums(p)
        elif SPLIT_P:
            s_left, s_right = split_columns(s)
            s_third, s_last = split_columns(s_right)
            p_left, p_third = exp2_scores(s_left, row_max, scale_log2), exp2_scores(s_third, row_max, scale_log2)
            row_sum += gl.convert_layout(partial_row_sums(p_left), SUM_LAYOUT)
            row_sum += gl.convert_layout(partial_row_sums(p_third), SUM_LAYOUT)
        else:
            p = exp2_scores(s, row_max, scale_log2)
            row_sum += partial_row_sums(p)
        more = cursor.blocks_left >= 0
        # The next K is awaited here and not where it is needed: ptxas moves the wait for O += P V up to the last
        # branch. Without this one, O would be awaited before the exponentials begin.
        mbarrier.wait(barriers.k_full.index(following.stage), following.phase, pred=more)
        o = wait_columns(0, o_issued, VALUE_TAIL)
        consumer_release_v(v_stage, NUM_CONSUMERS, NUM_STAGES)
        if not FIXED_MAX:
            o = scale_rows(o, rescale, VALUE_TAIL)
        elif SPLIT_P:
            p_last = exp2_scores(s_last, row_max, scale_log2)
            row_sum += gl.convert_layout(partial_row_sums(p_last), SUM_LAYOUT)
            p = join_columns(p_left, join_columns(p_third, p_last))
        p_operand = gl.convert_layout(p.to(dtype), P_LAYOUT)
    return o, RowState(p_operand, row_max, row_sum), state


@gluon.jit
def _process_work_tiles(w: gl.constexpr, args, state, num_tiles, MASK: gl.constexpr, TRAITS: gl.constexpr,
                        RETRY: gl.constexpr):  # fmt: skip
    """Consumer `w`: 64 rows of all work tiles, or with RETRY of the flagged ones.

    An iteration takes a work tile from P of its first K block to its stored O. With OVERLAP it also computes P of the
    next work tile's first K block, while this one's last O += P V runs. Where the two are too far apart in the K/V ring
    (`blocks_between`), and without OVERLAP, a work tile computes its own first P (the prologue).

    `state` is the position in the K/V ring, `num_tiles` the number of work tiles so far; returns both at the end.
    """
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    HEAD_DIM: gl.constexpr = TRAITS.HEAD_DIM
    VALUE_DIM: gl.constexpr = TRAITS.VALUE_DIM
    VALUE_TAIL: gl.constexpr = TRAITS.VALUE_TAIL
    OVERLAP: gl.constexpr = TRAITS.OVERLAP and not RETRY
    FIXED_MAX: gl.constexpr = TRAITS.FIXED_MAX and not RETRY
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_COLUMNS: gl.constexpr = left_columns(VALUE_DIM, VALUE_TAIL)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O_COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    buffers, barriers, tables, scores = args.buffers, args.barriers, args.tables, args.scores
    dtype: gl.constexpr = buffers.k.dtype
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    no_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    empty = RowState(gl.convert_layout(zeros.to(dtype), P_LAYOUT), no_max, partial_row_sums(zeros))
    rows = empty
    step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, 0, RETRY, TRAITS.VARLEN)
    _, cursor = first_block(table_row(work_tile, tables, w, NUM_CONSUMERS), tables)
    following_tile = work_tile
    between = NUM_STAGES - 1  # K blocks between this work tile and the next, or NUM_STAGES - 1: they do not overlap
    started = False
    while work_tile.tile >= 0:
        slot, phase = q_slot(num_tiles, w, TRAITS)
        q_tile = buffers.q.index(slot).reshape([64, HEAD_DIM])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        q = _load_q(q_tile, TRAITS)
        num_visited = gl.to_tensor(1)  # or more, if it has started
        if not OVERLAP or not started:  # prologue: P of the first K block
            skipped, cursor = first_block(table_row(work_tile, tables, w, NUM_CONSUMERS), tables)
            num_visited = cursor.blocks_left + 1
            state = skip_blocks(barriers, state, skipped, NUM_CONSUMERS, NUM_STAGES)
            if num_visited > 0:
                stage, phase = state
                mbarrier.wait(barriers.k_full.index(stage), phase)
                s_issued = _issue_s(q, buffers.k, stage, zeros, TRAITS)
                if OVERLAP:
                    following_tile = work_tile_at(args.work_tiles, step + 1, TRAITS.VARLEN)
                    between = blocks_between(work_tile, following_tile, tables, w, NUM_CONSUMERS, NUM_STAGES)
                block, masked = cursor.position.block, cursor.position.masked
                cursor = advance(cursor, tables)
                s = warpgroup_mma_wait(0, deps=[s_issued])
                consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
                s = masked_scores(s, block, masked, work_tile, scores, w, MASK, TRAITS)
                p, row_max, row_sum = first_softmax(s, scores.scale_log2, FIXED_MAX)
                rows = RowState(gl.convert_layout(p.to(dtype), P_LAYOUT), row_max, row_sum)
                second = next_stage(state, NUM_STAGES)
                mbarrier.wait(barriers.k_full.index(second.stage), second.phase, pred=cursor.blocks_left >= 0)
            else:
                rows = empty
                between = gl.to_tensor(NUM_STAGES - 1)
                if OVERLAP:
                    following_tile = work_tile_at(args.work_tiles, step + 1, TRAITS.VARLEN)
        o, rows, state = _mma_loop(args, work_tile, q, state, cursor, rows, w, MASK, FIXED_MAX, TRAITS)
        if not TRAITS.REUSE_Q_FOR_O:
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
        started = between < NUM_STAGES - 1
        p_operand, row_max, row_sum = rows
        v_stage, v_phase = state
        v_tile = buffers.v.index(v_stage).reshape([BLOCK_N, VALUE_DIM])
        if OVERLAP and started:  # the next work tile's first S, then this one's last O += P V
            state = skip_blocks(barriers, next_stage(state, NUM_STAGES), between, NUM_CONSUMERS, NUM_STAGES)
            stage, phase = state
            slot, q_phase = q_slot(num_tiles + 1, w, TRAITS)
            mbarrier.wait(barriers.q_full.index(slot), q_phase)
            mbarrier.wait(barriers.k_full.index(stage), phase)
            q_tile = buffers.q.index(slot).reshape([64, HEAD_DIM])
            s_issued = issue_s(q_tile, buffers.k, stage, zeros, TRAITS)
            mbarrier.wait(barriers.v_full.index(v_stage), v_phase)
            o_issued = issue_columns(p_operand, v_tile, o, VALUE_DIM, VALUE_TAIL)
            _, cursor = first_block(table_row(following_tile, tables, w, NUM_CONSUMERS), tables)
            o_scale = finalize(row_max, row_sum, 1.0, work_tile, step, num_visited, args, w, FIXED_MAX, MIN_ROW_SUM,
                               0.0, TRAITS)  # fmt: skip
            block, masked = cursor.position.block, cursor.position.masked
            cursor = advance(cursor, tables)
            s = warpgroup_mma_wait(num_products(VALUE_TAIL), deps=[s_issued])
            consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
            third_tile = work_tile_at(args.work_tiles, step + 2, TRAITS.VARLEN)
            between = blocks_between(following_tile, third_tile, tables, w, NUM_CONSUMERS, NUM_STAGES)
            s = masked_scores(s, block, masked, following_tile, scores, w, MASK, TRAITS)
            p, row_max, row_sum = first_softmax(s, scores.scale_log2, FIXED_MAX)
            # As in `_mma_loop`, a branch that keeps the wait for O behind the exponentials.
            second = next_stage(state, NUM_STAGES)
            mbarrier.wait(barriers.k_full.index(second.stage), second.phase, pred=cursor.blocks_left >= 0)
            o = wait_columns(0, o_issued, VALUE_TAIL)
            consumer_release_v(v_stage, NUM_CONSUMERS, NUM_STAGES)
            rows = RowState(gl.convert_layout(p.to(dtype), P_LAYOUT), row_max, row_sum)
        else:
            third_tile = following_tile
            if num_visited > 0:
                mbarrier.wait(barriers.v_full.index(v_stage), v_phase)
                o_issued = issue_columns(p_operand, v_tile, o, VALUE_DIM, VALUE_TAIL)
                row = table_row(work_tile, tables, w, NUM_CONSUMERS)
                skipped = gl.load(range_counts_of(row, tables) + 2)
                o = wait_columns(0, o_issued, VALUE_TAIL)
                consumer_release_v(v_stage, NUM_CONSUMERS, NUM_STAGES)
                state = skip_blocks(barriers, next_stage(state, NUM_STAGES), skipped, NUM_CONSUMERS, NUM_STAGES)
            o_scale = finalize(row_max, row_sum, 1.0, work_tile, step, num_visited, args, w, FIXED_MAX, MIN_ROW_SUM,
                               0.0, TRAITS)  # fmt: skip
        # Epilogue
        o = scale_rows(o, o_scale, VALUE_TAIL)
        store_o(o, args, work_tile, w, TRAITS)
        if TRAITS.REUSE_Q_FOR_O:  # only now may the next Q come
            tma.store_wait(0)
            mbarrier.arrive(barriers.q_empty.index(w), count=1)
        num_tiles += 1
        if OVERLAP:
            step += 1
            work_tile, following_tile = following_tile, third_tile
        else:
            step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, step + 1, RETRY, TRAITS.VARLEN)
    return state, num_tiles


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
SIZES = (
    "max_ranges", "max_loads", "batch_stride", "head_stride", "max_work_tiles", "heads", "seqlen_q", "seqlen_k",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def attention_forward(
    lse, q, k, v, o, sinks, retry_flags, mask_tables, tables, max_ranges, max_loads, batch_stride, head_stride,
    max_work_tiles, heads, group_size, seqlen_q, seqlen_k, scales,
    MASK: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """O and LSE. q, k, v, o are TMA descriptors; tables are `TileTables`, scales `Scales`."""
    NUM_Q: gl.constexpr = TRAITS.Q_STAGES * TRAITS.NUM_CONSUMERS
    q_buffers = gl.allocate_shared_memory(q.dtype, [NUM_Q] + q.block_shape, q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [TRAITS.NUM_STAGES] + k.block_shape, k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [TRAITS.NUM_STAGES] + v.block_shape, v.layout)
    if TRAITS.REUSE_Q_FOR_O:
        o_buffers = q_buffers
    else:
        o_buffers = gl.allocate_shared_memory(o.dtype, [TRAITS.NUM_CONSUMERS] + o.block_shape, o.layout)
    buffers = Buffers(q_buffers, k_buffers, v_buffers, o_buffers)
    sizes = TableSizes(max_ranges, max_loads, batch_stride, head_stride, max_work_tiles)
    scores = ScoreParams(seqlen_q, seqlen_k, scales.scale_log2, scales.softmax_scale, scales.softcap, mask_tables)
    run_warp_roles(
        q, k, v, o, lse, sinks, buffers, retry_flags, tables, sizes, heads, group_size, scores, None,
        _process_work_tiles, MASK, TRAITS,
    )  # fmt: skip
