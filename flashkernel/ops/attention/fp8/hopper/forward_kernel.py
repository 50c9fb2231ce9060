"""FP8 attention forward on Hopper: the pipeline of the 16-bit kernel, with both matrix products in e4m3.

FP8 WGMMA needs the summed index of both operands contiguous in memory (K-major). For S = Q K^T, Q and K have that
layout. For O = P V it needs V^T with contiguous keys: TMA loads tiles of V^T as they are.

P goes from the accumulator registers of S to the operand registers of P V. In groups of 16 keys, a thread has columns
2t, 2t + 1, 8 + 2t, 9 + 2t of S, but needs 4t to 4t + 3 of P. So K is loaded with its keys permuted: TMA sees K in
quads, key = 4 quad + 2 pair + one, and loads all first pairs and then all second ones. Column (pair, quad, one) of S,
read as (quad, pair, one), is then the operand of P V: no register moves.

P is scaled to where e4m3 has all its bits. The online softmax puts the row max so far at 2^8. LAZY_RESCALE (the
optimistic softmax of this kernel) puts the row max of the first K block at 2^4, and rescales a row only when the
partial sums of a later block say that an element of P may exceed 448. Rows that may have overflowed float32 flag their
work tile, which is then computed again with the online softmax (overflow_retry.py).

The scales of Q and K are part of the factor inside exp2. O is kept in units of the current block's V scale; the
multiplication that rescales O also changes the unit.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.pipeline_gluon import next_stage
from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flashkernel.ops.attention.fp8.hopper.assembly import (
    EXP2,
    EXP2_CONSTRAINTS,
    FOUR_TO_E4M3,
    RESCALE,
    RESCALE_CONSTRAINTS,
)
from flashkernel.ops.attention.hopper.overflow_retry import next_work_tile
from flashkernel.ops.attention.hopper.pipeline import (
    consumer_release_k,
    consumer_release_v,
    first_block,
    first_query,
    skip_blocks,
    table_row,
)
from flashkernel.ops.attention.hopper.softmax import ScoreParams, apply_mask, block_row_max, finalize, partial_row_sums
from flashkernel.ops.attention.hopper.warp_roles import (
    Buffers,
    TableSizes,
    issue_s,
    q_slot,
    run_warp_roles,
    store_o,
)

E4M3_MAX = gl.constexpr(448.0)
P_MAX_LOG2 = gl.constexpr(8.0)  # online softmax: the row max of P is 2^8
LAZY_MAX_LOG2 = gl.constexpr(4.0)  # lazy rescaling: the first K block's row max of P is 2^4
RESCALED_SUM_LOG2 = gl.constexpr(5)  # a rescaled row's largest partial sum is at least 2^5
MAX_RESCALE_LOG2 = gl.constexpr(100)  # a row that would be rescaled by more may have overflowed float32
MIN_LAZY_SUM = gl.constexpr(15.0)  # a row sum is at least 2^4, unless no key of the first K block is visible
SCALE_BLOCK = gl.constexpr(128)  # tokens that share a scale


class Fp8Traits(NamedTuple):
    """What the kernel is compiled for; see `ForwardTraits` for the fields that both kernels have."""

    NUM_CONSUMERS: int
    NUM_STAGES: int
    BLOCK_N: int
    HEAD_DIM: int
    VALUE_DIM: int  # equal to HEAD_DIM
    PACK_GQA: int
    LAZY_RESCALE: bool
    OVERFLOW_RETRY: bool  # equal to LAZY_RESCALE
    POLYNOMIAL_EXP2: int  # so many of every 8 exponentials are computed by FMAs
    SOFTCAP: bool
    SCALE_FIRST: bool  # S is scaled before the row max: the scale is <= 0
    HAS_SINKS: bool
    Q_BLOCK_SCALES: int  # 1 if Q has a scale for every SCALE_BLOCK tokens, 0 if one per head
    K_BLOCK_SCALES: int
    V_BLOCK_SCALES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    HEAD_TAIL: int = 0
    VALUE_TAIL: int = 0
    Q_STAGES: int = 1
    PAD_FRONT: bool = False
    REUSE_Q_FOR_O: bool = False
    MASK_RELATIVE: bool = False
    MASK_BOUNDED: bool = False
    VARLEN: bool = False
    FP8: bool = True


class Descales(NamedTuple):
    """Scales by which Q, K and V are dequantized: float32 (batch, heads, blocks) each, and their numbers of blocks."""

    q: Any
    k: Any
    v: Any
    q_blocks: Any
    k_blocks: Any
    v_blocks: Any
    group_size: Any


@gluon.jit
def _masked_scores(s, scale, block, masked, work_tile, params, w: gl.constexpr, MASK: gl.constexpr,
                   TRAITS: gl.constexpr):  # fmt: skip
    """Returns S [64, BLOCK_N], columns in the order (pair, quad, one), with -inf where the mask hides a key. `scale`
    [64] is applied here with a softcap or SCALE_FIRST, else inside exp2."""
    if TRAITS.SOFTCAP:
        s = (params.softcap * LOG2E) * tanh(s * (scale / params.softcap)[:, None])
    elif TRAITS.SCALE_FIRST:
        s = s * scale[:, None]
    if masked != 0:
        HALF: gl.constexpr = TRAITS.BLOCK_N // 2
        column = gl.arange(0, TRAITS.BLOCK_N, gl.SliceLayout(0, s.type.layout))
        quad = (column % HALF) // 2
        key = block * TRAITS.BLOCK_N + 4 * quad + 2 * (column // HALF) + column % 2
        s = apply_mask(s, key[None, :], 0, work_tile, params, w, MASK, TRAITS)
    return s


@gluon.jit
def _exp2(s, scale, shift, TRAITS: gl.constexpr):
    """Returns P = exp2(S * scale + shift), [64, BLOCK_N]."""
    if TRAITS.POLYNOMIAL_EXP2 == 0:
        p = gl.exp2(s * scale[:, None] + shift[:, None])
    else:
        operands = [s, scale[:, None], shift[:, None], (scale / 254)[:, None], ((shift + 127) / 254)[:, None]]
        p = gl.inline_asm_elementwise(
            EXP2[TRAITS.POLYNOMIAL_EXP2], EXP2_CONSTRAINTS, operands, dtype=gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    return p


@gluon.jit
def _update_max(s, row_max, scale):
    """Returns (what O and l are rescaled by, the finite row max to subtract, the new row max), in units of log2."""
    new_max = gl.maximum(row_max, block_row_max(s) * scale)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    return gl.exp2(row_max - finite_max), finite_max, new_max


@gluon.jit
def _lazy_rescale(block_sums, shift, ROWS: gl.constexpr):
    """Returns (what P, O and l are multiplied by, the new shift). The factor is 1 unless a partial sum, and so perhaps
    an element of P, exceeds what e4m3 can represent."""
    largest = gl.convert_layout(gl.max(block_sums, 1), ROWS)  # [64]
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    reduce_by = gl.where(largest > E4M3_MAX, exponent - RESCALED_SUM_LOG2, 0)
    rescale = ((127 - reduce_by) << 23).to(gl.float32, bitcast=True)  # 2^-reduce_by
    # A far larger sum may have overflowed: NaN flags the row's work tile.
    return gl.where(reduce_by < MAX_RESCALE_LOG2, rescale, float("nan")), shift - reduce_by.to(gl.float32)


@gluon.jit
def _to_operand(p, P_LAYOUT: gl.constexpr):
    """Returns P in e4m3, [64, BLOCK_N], with its keys in order."""
    p = p.reshape([64, 2, p.shape[1] // 4, 2]).permute(0, 2, 1, 3).reshape([64, p.shape[1]])
    p = gl.convert_layout(p, P_LAYOUT)
    return gl.inline_asm_elementwise(FOUR_TO_E4M3, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _rescale_rows(x, rescale, COLUMNS: gl.constexpr):
    """Returns x [64, COLUMNS] times rescale [64], which is 1 for most rows: a warp skips it if it is 1 for all its
    rows."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, x.type.layout))
    return gl.inline_asm_elementwise(
        RESCALE[COLUMNS], RESCALE_CONSTRAINTS[COLUMNS], [x, rescale[:, None]], dtype=gl.float32, is_pure=True,
        pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.jit
def _issue_o(p_operand, v_buffers, stage, o, TRAITS: gl.constexpr):
    """Issues O += P V, [64, HEAD_DIM], with V^T in shared memory."""
    v_tile = v_buffers.index(stage).reshape([TRAITS.HEAD_DIM, TRAITS.BLOCK_N]).permute((1, 0))
    return warpgroup_mma(p_operand, v_tile, o, is_async=True)


@gluon.jit
def _mma_loop(args, work_tile, q_tile, q_empty, state, cursor, q_scale, k_scales, v_scales, w: gl.constexpr,
              MASK: gl.constexpr, LAZY_RESCALE: gl.constexpr, TRAITS: gl.constexpr):  # fmt: skip
    """Iterates over the K blocks of a work tile, at least one. As in the 16-bit kernel, S of a K block is issued before
    O += P V of the block before.

    q_scale [64] is softmax_scale times Q's scale; k_scales and v_scales point to those of the kv head. Returns
    (O [64, HEAD_DIM], m [64], l [64, 8], the unit of O, the position behind the blocks skipped after the last one).
    """
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    HEAD_DIM: gl.constexpr = TRAITS.HEAD_DIM
    BLOCK_SCALES: gl.constexpr = TRAITS.K_BLOCK_SCALES + TRAITS.V_BLOCK_SCALES > 0
    SCALED: gl.constexpr = TRAITS.SCALE_FIRST or TRAITS.SOFTCAP  # S is in units of log2 before exp2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    buffers, barriers, tables, scores = args.buffers, args.barriers, args.tables, args.scores
    blocks_left, position = cursor
    range_offset, block, block_end, masked = position
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scale_block = block * BLOCK_N // SCALE_BLOCK
    scale = q_scale * gl.load(k_scales + scale_block * TRAITS.K_BLOCK_SCALES)  # [64]
    o_unit = gl.load(v_scales + scale_block * TRAITS.V_BLOCK_SCALES)
    stage, phase = state
    mbarrier.wait(barriers.k_full.index(stage), phase)
    s_issued = issue_s(q_tile, buffers.k, stage, zeros, TRAITS)
    s = warpgroup_mma_wait(0, deps=[s_issued])
    consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
    s = _masked_scores(s, scale, block, masked, work_tile, scores, w, MASK, TRAITS)
    row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
    one = gl.full([64], 1.0, gl.float32, ROWS)
    _, finite_max, row_max = _update_max(s, row_max, one if SCALED else scale)
    shift = (LAZY_MAX_LOG2 if LAZY_RESCALE else P_MAX_LOG2) - finite_max
    p = _exp2(s, one if SCALED else scale, shift, TRAITS)
    row_sum = partial_row_sums(p)
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    o = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    following = next_stage(state, NUM_STAGES)
    mbarrier.wait(barriers.k_full.index(following.stage), following.phase, pred=blocks_left > 0)
    first = block + 1
    while blocks_left > 0:  # a loop for each range, so that no step asks where the range ends
        if first == block_end:  # the next range
            range_offset += 3
            first = gl.load(tables.ranges + range_offset)
            block_end = gl.load(tables.ranges + range_offset + 1)
            masked = gl.load(tables.ranges + range_offset + 2)
        for block in range(first, block_end):
            v_stage, v_phase = state
            state = following
            stage = state.stage
            following = next_stage(state, NUM_STAGES)
            if BLOCK_SCALES:
                scale_block = block * BLOCK_N // SCALE_BLOCK
                scale = q_scale * gl.load(k_scales + scale_block * TRAITS.K_BLOCK_SCALES)
                last_unit = o_unit
                o_unit = gl.load(v_scales + scale_block * TRAITS.V_BLOCK_SCALES)
            p_operand = _to_operand(p, P_LAYOUT)  # here: bytes carried around the loop take a register each
            s_issued = issue_s(q_tile, buffers.k, stage, zeros, TRAITS)
            mbarrier.wait(barriers.v_full.index(v_stage), v_phase)
            o_issued = _issue_o(p_operand, buffers.v, v_stage, o, TRAITS)
            s = warpgroup_mma_wait(1, deps=[s_issued])
            s = _masked_scores(s, scale, block, masked, work_tile, scores, w, MASK, TRAITS)
            if LAZY_RESCALE:
                p = _exp2(s, one if SCALED else scale, shift, TRAITS)
                block_sums = partial_row_sums(p)
                p_rescale, shift = _lazy_rescale(block_sums, shift, ROWS)
                row_sum = (row_sum + block_sums) * gl.convert_layout(p_rescale, SUM_ROWS)[:, None]
                rescale = p_rescale
            else:
                rescale, finite_max, row_max = _update_max(s, row_max, one if SCALED else scale)
                p = _exp2(s, one if SCALED else scale, P_MAX_LOG2 - finite_max, TRAITS)
                row_sum = row_sum * gl.convert_layout(rescale, SUM_ROWS)[:, None] + partial_row_sums(p)
            if BLOCK_SCALES:
                rescale = rescale * (last_unit / o_unit)
            # The next K is awaited here and not where it is needed: ptxas moves the wait for O += P V up to the last
            # branch. Without this one, O would be awaited before the exponentials begin.
            mbarrier.wait(barriers.k_full.index(following.stage), following.phase, pred=blocks_left > 1)
            o = warpgroup_mma_wait(0, deps=[o_issued])
            consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
            consumer_release_v(v_stage, NUM_CONSUMERS, NUM_STAGES)
            o = _rescale_rows(o, rescale, HEAD_DIM)
            if LAZY_RESCALE:
                p = _rescale_rows(p, p_rescale, BLOCK_N)
            blocks_left -= 1
        first = block_end
    mbarrier.arrive(q_empty, count=1)
    mbarrier.wait(barriers.v_full.index(state.stage), state.phase)
    o_issued = _issue_o(_to_operand(p, P_LAYOUT), buffers.v, state.stage, o, TRAITS)
    skipped = gl.load(tables.range_counts + table_row(work_tile, tables, w, NUM_CONSUMERS) * 3 + 2)
    o = warpgroup_mma_wait(0, deps=[o_issued])
    consumer_release_v(state.stage, NUM_CONSUMERS, NUM_STAGES)
    state = skip_blocks(barriers, following, skipped, NUM_CONSUMERS, NUM_STAGES)
    if LAZY_RESCALE:
        row_max = P_MAX_LOG2 - shift
    return o, row_max, row_sum, o_unit, state


@gluon.jit
def _process_work_tiles(w: gl.constexpr, args, state, num_tiles, MASK: gl.constexpr, TRAITS: gl.constexpr,
                        RETRY: gl.constexpr):  # fmt: skip
    """Consumer `w`: 64 rows of all work tiles, or with RETRY of the flagged ones.

    `state` is the position in the K/V ring, `num_tiles` the number of work tiles so far; returns both at the end.
    """
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    PACK_GQA: gl.constexpr = TRAITS.PACK_GQA
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    HEAD_DIM: gl.constexpr = TRAITS.HEAD_DIM
    LAZY_RESCALE: gl.constexpr = TRAITS.LAZY_RESCALE and not RETRY
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    buffers, barriers, tables, descales = args.buffers, args.barriers, args.tables, args.descales
    seqlen_q = args.scores.seqlen_q
    step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, 0, RETRY)
    while work_tile.tile >= 0:
        skipped, cursor = first_block(table_row(work_tile, tables, w, NUM_CONSUMERS), tables)
        num_visited = cursor.blocks_left + 1
        _, b, h = work_tile
        row = gl.arange(0, 64, ROWS)
        query = first_query(work_tile, w, seqlen_q, NUM_CONSUMERS, 64 // PACK_GQA, False) + row // PACK_GQA  # [64]
        q_block = gl.minimum(query, seqlen_q - 1) // SCALE_BLOCK * TRAITS.Q_BLOCK_SCALES
        q_scale = gl.load(descales.q + (b * args.heads + h + row % PACK_GQA) * descales.q_blocks + q_block)  # [64]
        kv_head = b * (args.heads // descales.group_size) + h // descales.group_size
        state = skip_blocks(barriers, state, skipped, NUM_CONSUMERS, NUM_STAGES)
        slot, phase = q_slot(num_tiles, w, TRAITS)
        q_empty = barriers.q_empty.index(slot)
        mbarrier.wait(barriers.q_full.index(slot), phase)
        if num_visited > 0:
            o, row_max, row_sum, o_unit, state = _mma_loop(
                args, work_tile, buffers.q.index(slot).reshape([64, HEAD_DIM]), q_empty, state, cursor,
                q_scale * args.scores.softmax_scale, descales.k + kv_head * descales.k_blocks,
                descales.v + kv_head * descales.v_blocks, w, MASK, LAZY_RESCALE, TRAITS,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_empty, count=1)
            o = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
            row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
            row_sum = partial_row_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            o_unit = gl.load(descales.v)  # of an O of zeros
        # Epilogue
        o_scale = finalize(row_max, row_sum, o_unit, work_tile, step, num_visited, args, w, LAZY_RESCALE, MIN_LAZY_SUM,
                           P_MAX_LOG2, TRAITS)  # fmt: skip
        o = o * gl.convert_layout(o_scale, gl.SliceLayout(1, O_LAYOUT))[:, None]
        store_o(o, args, work_tile, w, TRAITS)
        num_tiles += 1
        step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, step + 1, RETRY)
    return state, num_tiles


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "max_ranges", "max_loads", "batch_stride", "head_stride", "max_work_tiles", "heads", "seqlen_q", "seqlen_k",
    "q_blocks", "k_blocks", "v_blocks",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward_fp8(
    lse, q, k, v, o, sinks, q_scale, k_scale, v_scale, retry_flags, mask_tables, tables, max_ranges, max_loads,
    batch_stride, head_stride, max_work_tiles, heads, group_size, seqlen_q, seqlen_k, q_blocks, k_blocks, v_blocks,
    softmax_scale, softcap,
    MASK: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """O and LSE. q, k, v, o are TMA descriptors, tables are `TileTables`. softmax_scale includes log2(e), unless there
    is a softcap."""
    PACK_GQA: gl.constexpr = TRAITS.PACK_GQA
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    HEAD_DIM: gl.constexpr = TRAITS.HEAD_DIM
    q_shape: gl.constexpr = [TRAITS.NUM_CONSUMERS, 1, 64 // PACK_GQA, PACK_GQA, HEAD_DIM]
    q_buffers = gl.allocate_shared_memory(q.dtype, q_shape, q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [TRAITS.NUM_STAGES, 1, 2, BLOCK_N // 4, 2, HEAD_DIM], k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [TRAITS.NUM_STAGES, 1, 1, HEAD_DIM, BLOCK_N], v.layout)
    o_buffers = gl.allocate_shared_memory(o.dtype, q_shape, o.layout)
    buffers = Buffers(q_buffers, k_buffers, v_buffers, o_buffers)
    sizes = TableSizes(max_ranges, max_loads, batch_stride, head_stride, max_work_tiles)
    scores = ScoreParams(seqlen_q, seqlen_k, softmax_scale, softmax_scale, softcap, mask_tables)
    descales = Descales(q_scale, k_scale, v_scale, q_blocks, k_blocks, v_blocks, group_size)
    run_warp_roles(
        q, k, v, o, lse, sinks, buffers, retry_flags, tables, sizes, heads, group_size, scores, descales,
        _process_work_tiles, MASK, TRAITS,
    )  # fmt: skip
