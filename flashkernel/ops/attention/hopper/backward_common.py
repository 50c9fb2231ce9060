"""Device functions that the Hopper backward kernels share: the producer warp, the mask, P, and the product dQ = dS K.

A work tile is a tile of keys of one kv head. It iterates over the blocks of queries that see it, of all `group_size`
query heads that share the kv head. The producer warp runs ahead into the next work tile. It also stores: consumers
leave dK and dV in the buffers of K and V, and the producer stores them by TMA before it loads the next K and V there.
With two of these buffers (KV_STAGES) the next work tile's K and V arrive before this work tile ends.

Runtime values travel in NamedTuples. What a kernel is compiled for is one NamedTuple of plain values, TRAITS; the mask
function is a constexpr of its own, so that its source is part of Triton's cache key.
"""

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.ragged_gluon import head_coords
from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import gl, gluon, load_tile, mbarrier, store_tile, tma, warpgroup_mma
from flashkernel.ops.attention.hopper.pipeline import (
    RECORD,
    BlockCursor,
    range_counts_of,
    range_offset_of,
    sequence_of,
    table_row,
    work_tile_at,
)

# Whether these are multiples of 16 makes no difference here, and would only compile a kernel again. Triton compiles for
# it nevertheless inside NamedTuples, so the kernels take them as arguments of their own.
SIZES = (
    "max_ranges", "max_loads", "batch_stride", "head_stride", "max_work_tiles", "batch_kv_heads", "kv_heads",
    "q_blocks", "seqlen_q", "seqlen_k",
)  # fmt: skip


class BackwardTraits(NamedTuple):
    """What a backward kernel is compiled for, beside the mask. `BackwardConfig` describes the first ones."""

    BLOCK_M: int  # queries of a block
    NUM_STAGES: int
    KV_STAGES: int
    FOLD_LSE: bool
    FOLD_DELTA: bool
    DQ_MODE: str
    HEAD_DIM: int  # of Q and K, padded
    VALUE_DIM: int  # of V, padded
    SOFTCAP: bool
    MASK_RELATIVE: bool  # the mask depends on the difference of positions alone
    MASK_BOUNDED: bool  # the mask is False for keys past the last one
    PDL: bool
    HEAD_TAIL: int = 0  # columns behind the first half of HEAD_DIM that are multiplied; 0 for all (head_split.py)
    VALUE_TAIL: int = 0
    VARLEN: bool = False  # packed sequences: work tiles and descriptors follow them


class Buffers(NamedTuple):
    """Tiles in shared memory that the producer fills: by stage, and for K and V by KV stage."""

    q: Any  # [NUM_STAGES, 1, BLOCK_M, 1, HEAD_DIM]; with VARLEN there is one more dim of size 1, here and below
    do: Any  # [NUM_STAGES, 1, BLOCK_M, 1, VALUE_DIM]
    k: Any  # [KV_STAGES, 1, BLOCK_N, 1, HEAD_DIM]; dK in the end
    v: Any  # [KV_STAGES, 1, BLOCK_N, 1, VALUE_DIM]; dV in the end
    neg_lse: Any  # [NUM_STAGES, BLOCK_M]
    neg_delta: Any  # [NUM_STAGES, BLOCK_M]


class Barriers(NamedTuple):
    """mbarriers between the producer and the consumers. `full`: TMA has loaded a tile; `empty`: consumers have read it.
    `kv_done`: dK and dV are in the buffers of K and V."""

    kv_full: Any
    kv_done: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any


class ProducerArgs(NamedTuple):
    """TMA descriptors, the buffers they go through, and which blocks each work tile needs.

    lse_delta has -LSE of all queries (padded to `q_blocks` blocks for each head), and from `delta_start` on -delta.
    """

    q: Any
    do: Any
    k: Any
    v: Any
    lse_delta: Any
    dk: Any
    dv: Any
    buffers: Any
    barriers: Any
    work_tiles: Any
    loads: Any  # BlockTables
    heads: Any
    group_size: Any
    q_blocks: Any
    delta_start: Any


class ConsumerArgs(NamedTuple):
    """What consumers read, and `exchange`: tiles and barriers through which they pass P and dS on to each other."""

    dq_accum: Any  # dQ / softmax_scale in float32, [batch, heads, q_blocks, ...]
    buffers: Any
    barriers: Any
    exchange: Any
    work_tiles: Any
    visits: Any  # BlockTables
    heads: Any
    group_size: Any
    q_blocks: Any  # blocks of queries of a head
    scores: Any  # ScoreParams


@gluon.jit
def allocate_buffers(q, do, k, v, lse_delta, TRAITS: gl.constexpr):
    """Allocates the shared memory that the producer fills."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    k_buffers = gl.allocate_shared_memory(k.dtype, [TRAITS.KV_STAGES] + k.block_shape, k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [TRAITS.KV_STAGES] + v.block_shape, v.layout)
    q_buffers = gl.allocate_shared_memory(q.dtype, [NUM_STAGES] + q.block_shape, q.layout)
    do_buffers = gl.allocate_shared_memory(do.dtype, [NUM_STAGES] + do.block_shape, do.layout)
    neg_lse = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, TRAITS.BLOCK_M], lse_delta.layout)
    neg_delta = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, TRAITS.BLOCK_M], lse_delta.layout)
    return Buffers(q_buffers, do_buffers, k_buffers, v_buffers, neg_lse, neg_delta)


@gluon.jit
def _kv_coords(work_tile, x, schedule, TRAITS: gl.constexpr):
    """Returns the coordinates of a work tile of keys in the descriptor x."""
    if TRAITS.VARLEN:
        sequence = sequence_of(work_tile, schedule)
        coords = head_coords(sequence.k_start + sequence.first, work_tile.head, sequence.k_end)
    else:
        coords = [work_tile.batch, work_tile.tile * x.block_shape[1], work_tile.head, 0]
    return coords


@gluon.jit
def _load_kv(args, tile_index, TRAITS: gl.constexpr):
    """Load K and V of a work tile, if there is one."""
    work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
    if work_tile.tile >= 0:
        stage = tile_index % TRAITS.KV_STAGES
        full = args.barriers.kv_full.index(stage)
        mbarrier.expect(full, args.k.block_type.nbytes + args.v.block_type.nbytes)
        load_tile(args.k, _kv_coords(work_tile, args.k, args.work_tiles, TRAITS), full, args.buffers.k.index(stage))
        load_tile(args.v, _kv_coords(work_tile, args.v, args.work_tiles, TRAITS), full, args.buffers.v.index(stage))


@gluon.jit
def _store_dkdv(args, tile_index, TRAITS: gl.constexpr):
    """Store a work tile's dK and dV from the buffers of its K and V, and load there those of KV_STAGES tiles later."""
    KV_STAGES: gl.constexpr = TRAITS.KV_STAGES
    work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
    stage = tile_index % KV_STAGES
    mbarrier.wait(args.barriers.kv_done.index(stage), (tile_index // KV_STAGES) & 1)
    store_tile(args.dv, _kv_coords(work_tile, args.dv, args.work_tiles, TRAITS), args.buffers.v.index(stage))
    store_tile(args.dk, _kv_coords(work_tile, args.dk, args.work_tiles, TRAITS), args.buffers.k.index(stage))
    tma.store_wait(0)
    _load_kv(args, tile_index + KV_STAGES, TRAITS)


@gluon.jit
def _load_queries(args, batch, head, first_query, block, num_loaded, SHARE_BARRIERS: gl.constexpr,
                  TRAITS: gl.constexpr):  # fmt: skip
    """Load Q, dO, -LSE and -delta of a block of queries into the next stage, once the consumers have released it.
    `first_query` is that of the head in lse_delta; with VARLEN, `batch` is the sequence."""
    BLOCK_M: gl.constexpr = TRAITS.BLOCK_M
    Q_BYTES: gl.constexpr = args.q.block_type.nbytes + args.lse_delta.block_type.nbytes
    DO_BYTES: gl.constexpr = args.do.block_type.nbytes + args.lse_delta.block_type.nbytes
    buffers, barriers = args.buffers, args.barriers
    stage = num_loaded % TRAITS.NUM_STAGES
    phase = (num_loaded // TRAITS.NUM_STAGES) & 1
    q_full = barriers.q_full.index(stage)
    mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
    if SHARE_BARRIERS:
        do_full = q_full
        mbarrier.expect(q_full, Q_BYTES + DO_BYTES)
    else:
        do_full = barriers.do_full.index(stage)
        mbarrier.expect(q_full, Q_BYTES)
    query = first_query + block * BLOCK_M
    if TRAITS.VARLEN:
        coords = head_coords(batch.q_start + block * BLOCK_M, head, batch.q_end)
    else:
        coords = [batch, block * BLOCK_M, head, 0]
    load_tile(args.q, coords, q_full, buffers.q.index(stage))
    load_tile(args.lse_delta, [query], q_full, buffers.neg_lse.index(stage))
    if not SHARE_BARRIERS:
        mbarrier.wait(barriers.do_empty.index(stage), phase ^ 1)
        mbarrier.expect(do_full, DO_BYTES)
    load_tile(args.do, coords, do_full, buffers.do.index(stage))
    load_tile(args.lse_delta, [args.delta_start + query], do_full, buffers.neg_delta.index(stage))


@gluon.jit
def _num_load_ranges(row, loads):
    """Returns how many ranges of blocks a row loads; of packed sequences one, which may be empty."""
    if loads.batch_stride is None:
        count = gl.to_tensor(1)
    else:
        count = gl.load(loads.range_counts + row)
    return count


@gluon.jit
def _load_range(row, index, loads):
    """Returns (begin, end) of a range of blocks to load."""
    if loads.batch_stride is None:
        ranges = loads.ranges + row + (8 - RECORD)
    else:
        ranges = loads.ranges + (row * loads.max_ranges + index) * 3
    return gl.load(ranges), gl.load(ranges + 1)


@gluon.jit
def produce(args, SHARE_BARRIERS: gl.constexpr, TRAITS: gl.constexpr):
    """The producer warp: loads K, V, Q, dO, -LSE and -delta by TMA, stores dK and dV. With SHARE_BARRIERS, Q and dO
    have the same barriers.

    A work tile's dK and dV are stored once the first NUM_STAGES blocks of the next work tile are under way: there is no
    buffer for more of them until this work tile has ended. The end of the schedule counts as one more work tile,
    without blocks.
    """
    KV_STAGES: gl.constexpr = TRAITS.KV_STAGES
    loads = args.loads
    padded = args.q_blocks * TRAITS.BLOCK_M  # queries of a head in lse_delta
    if TRAITS.PDL:
        gdc_wait()
    for tile_index in gl.static_range(KV_STAGES):
        _load_kv(args, tile_index, TRAITS)
    num_loaded = 0
    tile_index = 0
    more = True
    while more:
        work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
        more = work_tile.tile >= 0
        if TRAITS.VARLEN:
            batch = sequence_of(work_tile, args.work_tiles)
        else:
            batch = work_tile.batch
        store_pending = tile_index > 0  # dK and dV of the work tile before
        last_free = num_loaded + TRAITS.NUM_STAGES
        for member in range(gl.where(more, args.group_size, 0)):
            head = work_tile.head * args.group_size + member
            row = _member_row(work_tile, head, loads)
            if TRAITS.VARLEN:
                first_query = head * padded + batch.block * TRAITS.BLOCK_M
            else:
                first_query = (batch * args.heads + head) * padded
            for index in range(_num_load_ranges(row, loads)):
                block_begin, block_end = _load_range(row, index, loads)
                for block in range(block_begin, block_end):
                    if store_pending & (num_loaded == last_free):
                        _store_dkdv(args, tile_index - 1, TRAITS)
                        store_pending = False
                    _load_queries(args, batch, head, first_query, block, num_loaded, SHARE_BARRIERS, TRAITS)
                    num_loaded += 1
        if store_pending:
            _store_dkdv(args, tile_index - 1, TRAITS)
        tile_index += 1


@gluon.jit
def _member_row(work_tile, head, tables):
    """Returns the row of a work tile and a query head of its group in the block tables."""
    if tables.batch_stride is None:  # packed sequences
        row = table_row(work_tile, tables, 0, 1)
    else:
        row = work_tile.batch.to(gl.int64) * tables.batch_stride + head * tables.head_stride
        row += gl.maximum(work_tile.tile, 0)
    return row


@gluon.jit
def before_first_block(work_tile, member, args):
    """Returns a BlockCursor before the first block of queries that sees a work tile, in query head `member` of its
    group; of some work tile if there is none. `blocks_left` counts that block, too."""
    tables = args.visits
    row = _member_row(work_tile, work_tile.head * args.group_size + member, tables)
    offset = range_offset_of(row, tables)
    num_blocks = gl.load(range_counts_of(row, tables) + 1)
    block_begin, block_end = gl.load(tables.ranges + offset), gl.load(tables.ranges + offset + 1)
    return BlockCursor(num_blocks, offset, block_begin - 1, block_end, gl.load(tables.ranges + offset + 2))


@gluon.jit
def first_dq_block(work_tile, args, VARLEN: gl.constexpr):
    """Returns the index in dq_accum of the first block of a work tile's first query head."""
    if args.dq_accum is None:
        block = gl.to_tensor(0)
    elif VARLEN:
        sequence = sequence_of(work_tile, args.work_tiles)
        block = work_tile.head * args.group_size * args.q_blocks + sequence.block
    else:
        block = (work_tile.batch * args.heads + work_tile.head * args.group_size) * args.q_blocks
    return block


@gluon.jit
def visible_keys(work_tile, head, first_query, first_key, scores, S_LAYOUT: gl.constexpr, MASK: gl.constexpr,
                 TRAITS: gl.constexpr):  # fmt: skip
    """[64, BLOCK_M]: which of 64 keys are visible to which queries. With VARLEN, `first_key` counts from the first key
    of the work tile."""
    BLOCK_M: gl.constexpr = TRAITS.BLOCK_M
    query = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S_LAYOUT))[None, :]  # [1, BLOCK_M]
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]  # [64, 1]
    if TRAITS.VARLEN:
        visible = key < work_tile.num_keys
        if MASK is not None:  # a key is at the position of the query that it is aligned with
            if TRAITS.MASK_RELATIVE:
                key = key + (work_tile.position - first_query)
            else:
                key = key + work_tile.position
                query = first_query + query
            by_mask = MASK(0, head, query, key, 0, 0, scores.mask_tables)
    else:
        visible = key < scores.seqlen_k
        if MASK is not None:
            if TRAITS.MASK_RELATIVE:  # both positions count from the first query
                by_mask = MASK(
                    work_tile.batch, head, query, key - first_query, scores.seqlen_q, scores.seqlen_k,
                    scores.mask_tables,
                )  # fmt: skip
            else:
                by_mask = MASK(
                    work_tile.batch, head, first_query + query, key, scores.seqlen_q, scores.seqlen_k,
                    scores.mask_tables,
                )  # fmt: skip
    if MASK is not None:
        if TRAITS.MASK_BOUNDED:
            visible = by_mask
        else:
            visible = visible & by_mask
    return visible


@gluon.jit
def probabilities(s, neg_lse, scores, SOFTCAP: gl.constexpr):
    """(P^T = exp(S^T - LSE), tanh of the scores before the softcap, or S^T without one), [64 keys, queries] each.

    The derivative of the capped scores is 1 - tanh^2.
    """
    if SOFTCAP:
        capped = tanh(s * (scores.softmax_scale / scores.softcap))
        p = gl.exp2(capped * (scores.softcap * LOG2E) + neg_lse)
    else:
        capped = s
        p = gl.exp2(s * scores.scale_log2 + neg_lse)
    return p, capped


@gluon.constexpr_function
def dq_columns(w, HEAD_DIM, HEAD_TAIL, BLOCK_M):
    """Returns the columns of warpgroup w's half of a block's dQ; of a split head the second has the tail."""
    if BLOCK_M == 128:
        return HEAD_DIM
    return HEAD_TAIL if w == 1 and HEAD_TAIL > 0 else HEAD_DIM // 2


@gluon.jit
def issue_dq(ds_tile, k_tile, zeros, w: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
             DQ_COLUMNS: gl.constexpr):  # fmt: skip
    """Issue warpgroup w's half of dQ = dS K, [64, DQ_COLUMNS]: of the rows of a block of 128 queries, else of the
    columns. `ds_tile` has dS^T, [keys, BLOCK_M]."""
    if BLOCK_M == 128:
        half_ds = ds_tile.slice(w * 64, 64, dim=1).permute((1, 0))  # [64, 128]
        dq = warpgroup_mma(half_ds, k_tile, zeros, use_acc=False, is_async=True)
    else:
        half_k = k_tile.slice(w * (HEAD_DIM // 2), DQ_COLUMNS, dim=1)
        dq = warpgroup_mma(ds_tile.permute((1, 0)), half_k, zeros, use_acc=False, is_async=True)
    return dq


@gluon.jit
def in_register_order(x, COLUMNS: gl.constexpr):
    """[64 * COLUMNS] of an accumulator [64, COLUMNS], in the order of the registers: 16 bytes a thread, side by side.

    Row 16 w + 8 i + r, column 8 j + 2 c + e lies at (j, w, r, c, i, e).
    """
    return x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * COLUMNS])


@gluon.jit
def atomic_add_dq(dq_accum, index, dq, COLUMNS: gl.constexpr, PIECE: gl.constexpr):
    """Add [64, COLUMNS] to the first columns of the `index`-th piece [64, PIECE] of dq_accum, `in_register_order`."""
    flat = in_register_order(dq, COLUMNS)
    address = dq_accum + index.to(gl.int64) * (64 * PIECE) + gl.arange(0, 64 * COLUMNS, flat.type.layout)
    gl.atomic_add(address, flat, sem="relaxed")
