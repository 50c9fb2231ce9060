"""Device functions that the consumers of the Hopper backward kernel share for heads of all widths: shared memory,
block ranges, the mask, P, and the product dQ = dS K.

Runtime values travel in NamedTuples. What the kernel is compiled for is one NamedTuple of plain values, TRAITS; the
mask function is a constexpr of its own, so that its source is part of Triton's cache key.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import gl, gluon, warpgroup_mma
from flashkernel.ops.attention.hopper.pipeline import (
    BlockCursor,
    BlockPosition,
    range_counts_of,
    range_offset_of,
    sequence_of,
    table_row,
)


class BackwardTraits(NamedTuple):
    """What the backward kernel is compiled for, beside the mask. `BackwardConfig` describes the first ones."""

    WIDE: bool  # heads wider than 128 (backward_wide_mainloop.py)
    BLOCK_M: int  # queries of a block
    BLOCK_N: int  # keys of a work tile
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


class Descriptors(NamedTuple):
    """TMA descriptors. lse_delta has -LSE of all queries (padded to whole blocks for each head), then -delta."""

    q: Any
    do: Any
    k: Any
    v: Any
    lse_delta: Any
    dk: Any
    dv: Any


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
def allocate_buffers(descriptors, TRAITS: gl.constexpr):
    """Allocates the shared memory that the producer fills."""
    q, do, k, v = descriptors.q, descriptors.do, descriptors.k, descriptors.v
    LSE_LAYOUT: gl.constexpr = descriptors.lse_delta.layout
    k_buffers = gl.allocate_shared_memory(k.dtype, [TRAITS.KV_STAGES] + k.block_shape, k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [TRAITS.KV_STAGES] + v.block_shape, v.layout)
    q_buffers = gl.allocate_shared_memory(q.dtype, [TRAITS.NUM_STAGES] + q.block_shape, q.layout)
    do_buffers = gl.allocate_shared_memory(do.dtype, [TRAITS.NUM_STAGES] + do.block_shape, do.layout)
    neg_lse = gl.allocate_shared_memory(gl.float32, [TRAITS.NUM_STAGES, TRAITS.BLOCK_M], LSE_LAYOUT)
    neg_delta = gl.allocate_shared_memory(gl.float32, [TRAITS.NUM_STAGES, TRAITS.BLOCK_M], LSE_LAYOUT)
    return Buffers(q_buffers, do_buffers, k_buffers, v_buffers, neg_lse, neg_delta)


@gluon.jit
def kv_tiles(buffers, stage, TRAITS: gl.constexpr):
    """Returns (K [BLOCK_N, HEAD_DIM], V [BLOCK_N, VALUE_DIM]) of a KV stage, in shared memory."""
    k_tile = buffers.k.index(stage).reshape([TRAITS.BLOCK_N, TRAITS.HEAD_DIM])
    return k_tile, buffers.v.index(stage).reshape([TRAITS.BLOCK_N, TRAITS.VALUE_DIM])


@gluon.jit
def query_tiles(buffers, stage, TRAITS: gl.constexpr):
    """Returns (Q [BLOCK_M, HEAD_DIM], dO [BLOCK_M, VALUE_DIM]) of a stage, in shared memory."""
    q_tile = buffers.q.index(stage).reshape([TRAITS.BLOCK_M, TRAITS.HEAD_DIM])
    return q_tile, buffers.do.index(stage).reshape([TRAITS.BLOCK_M, TRAITS.VALUE_DIM])


@gluon.jit
def member_row(work_tile, head, tables):
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
    row = member_row(work_tile, work_tile.head * args.group_size + member, tables)
    offset = range_offset_of(row, tables)
    num_blocks = gl.load(range_counts_of(row, tables) + 1)
    block_begin, block_end = gl.load(tables.ranges + offset), gl.load(tables.ranges + offset + 1)
    position = BlockPosition(offset, block_begin - 1, block_end, gl.load(tables.ranges + offset + 2))
    return BlockCursor(num_blocks, position)


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
    query = gl.arange(0, TRAITS.BLOCK_M, gl.SliceLayout(0, S_LAYOUT))[None, :]  # [1, BLOCK_M]
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
def issue_dq(ds_tile, k_tile, zeros, w: gl.constexpr, DQ_COLUMNS: gl.constexpr, TRAITS: gl.constexpr):
    """Issue warpgroup w's half of dQ = dS K, [64, DQ_COLUMNS]: of the rows of a block of 128 queries, else of the
    columns. `ds_tile` has dS^T, [keys, BLOCK_M]."""
    if TRAITS.BLOCK_M == 128:
        half_ds = ds_tile.slice(w * 64, 64, dim=1).permute((1, 0))  # [64, 128]
        dq = warpgroup_mma(half_ds, k_tile, zeros, use_acc=False, is_async=True)
    else:
        half_k = k_tile.slice(w * (TRAITS.HEAD_DIM // 2), DQ_COLUMNS, dim=1)
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
