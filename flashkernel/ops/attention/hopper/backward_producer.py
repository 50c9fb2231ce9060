"""The producer warp of the Hopper backward kernel.

A work tile is a tile of keys of one kv head. It iterates over the blocks of queries that see it, of all `group_size`
query heads that share the kv head. The producer warp runs ahead into the next work tile. It also stores: consumers
leave dK and dV in the buffers of K and V, and the producer stores them by TMA before it loads the next K and V there.
With two of these buffers (KV_STAGES) the next work tile's K and V arrive before this work tile ends.
"""

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.pipeline_gluon import stage_of
from flashkernel.blocks.ragged_gluon import head_coords
from flashkernel.core.gluon import gl, gluon, load_tile, mbarrier, store_tile, tma
from flashkernel.ops.attention.hopper.backward_common import member_row
from flashkernel.ops.attention.hopper.pipeline import RECORD, sequence_of, work_tile_at


class ProducerArgs(NamedTuple):
    """TMA descriptors, the buffers they go through, and which blocks each work tile needs."""

    descriptors: Any
    buffers: Any
    barriers: Any
    work_tiles: Any
    loads: Any  # BlockTables
    heads: Any
    group_size: Any
    q_blocks: Any  # blocks of queries of a head
    delta_start: Any  # where -delta begins in lse_delta


@gluon.jit
def _kv_coords(work_tile, schedule, TRAITS: gl.constexpr):
    """Returns the TMA coordinates of a work tile of keys."""
    if TRAITS.VARLEN:
        sequence = sequence_of(work_tile, schedule)
        coords = head_coords(sequence.k_start + sequence.first, work_tile.head, sequence.k_end)
    else:
        coords = [work_tile.batch, work_tile.tile * TRAITS.BLOCK_N, work_tile.head, 0]
    return coords


@gluon.jit
def _load_kv(args, tile_index, TRAITS: gl.constexpr):
    """Load K and V of a work tile, if there is one."""
    work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
    if work_tile.tile >= 0:
        stage = tile_index % TRAITS.KV_STAGES
        k, v = args.descriptors.k, args.descriptors.v
        full = args.barriers.kv_full.index(stage)
        mbarrier.expect(full, k.block_type.nbytes + v.block_type.nbytes)
        load_tile(k, _kv_coords(work_tile, args.work_tiles, TRAITS), full, args.buffers.k.index(stage))
        load_tile(v, _kv_coords(work_tile, args.work_tiles, TRAITS), full, args.buffers.v.index(stage))


@gluon.jit
def _store_dkdv(args, tile_index, TRAITS: gl.constexpr):
    """Store a work tile's dK and dV from the buffers of its K and V, and load there those of KV_STAGES tiles later."""
    work_tile = work_tile_at(args.work_tiles, tile_index, TRAITS.VARLEN)
    stage, phase = stage_of(tile_index, TRAITS.KV_STAGES)
    mbarrier.wait(args.barriers.kv_done.index(stage), phase)
    store_tile(args.descriptors.dv, _kv_coords(work_tile, args.work_tiles, TRAITS), args.buffers.v.index(stage))
    store_tile(args.descriptors.dk, _kv_coords(work_tile, args.work_tiles, TRAITS), args.buffers.k.index(stage))
    tma.store_wait(0)
    _load_kv(args, tile_index + TRAITS.KV_STAGES, TRAITS)


@gluon.jit
def _load_queries(args, batch, head, first_query, block, num_loaded, TRAITS: gl.constexpr):
    """Load Q, dO, -LSE and -delta of a block of queries into the next stage, once the consumers have released it.
    `first_query` is that of the head in lse_delta; with VARLEN, `batch` is the sequence."""
    SHARE_BARRIERS: gl.constexpr = not TRAITS.WIDE  # of Q and dO
    q, do, lse_delta = args.descriptors.q, args.descriptors.do, args.descriptors.lse_delta
    Q_BYTES: gl.constexpr = q.block_type.nbytes + lse_delta.block_type.nbytes
    DO_BYTES: gl.constexpr = do.block_type.nbytes + lse_delta.block_type.nbytes
    buffers, barriers = args.buffers, args.barriers
    stage, phase = stage_of(num_loaded, TRAITS.NUM_STAGES)
    q_full = barriers.q_full.index(stage)
    mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
    if SHARE_BARRIERS:
        do_full = q_full
        mbarrier.expect(q_full, Q_BYTES + DO_BYTES)
    else:
        do_full = barriers.do_full.index(stage)
        mbarrier.expect(q_full, Q_BYTES)
    query = first_query + block * TRAITS.BLOCK_M
    if TRAITS.VARLEN:
        coords = head_coords(batch.q_start + block * TRAITS.BLOCK_M, head, batch.q_end)
    else:
        coords = [batch, block * TRAITS.BLOCK_M, head, 0]
    load_tile(q, coords, q_full, buffers.q.index(stage))
    load_tile(lse_delta, [query], q_full, buffers.neg_lse.index(stage))
    if not SHARE_BARRIERS:
        mbarrier.wait(barriers.do_empty.index(stage), phase ^ 1)
        mbarrier.expect(do_full, DO_BYTES)
    load_tile(do, coords, do_full, buffers.do.index(stage))
    load_tile(lse_delta, [args.delta_start + query], do_full, buffers.neg_delta.index(stage))


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
def produce(args, TRAITS: gl.constexpr):
    """The producer warp: loads K, V, Q, dO, -LSE and -delta by TMA, stores dK and dV.

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
            row = member_row(work_tile, head, loads)
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
                    _load_queries(args, batch, head, first_query, block, num_loaded, TRAITS)
                    num_loaded += 1
        if store_pending:
            _store_dkdv(args, tile_index - 1, TRAITS)
        tile_index += 1
