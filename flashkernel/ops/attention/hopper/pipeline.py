"""Device functions of the Hopper kernels: the K/V pipeline, work tiles, and the K blocks that a consumer visits.

K and V go through a ring of NUM_STAGES stages in shared memory. TMA signals a loaded tile on an mbarrier (k_full,
v_full). Consumers release a stage through a named barrier, on which the producer warp waits before it loads the next
block there (`producer_acquire_k`, `producer_acquire_v`).

The tables that say what is loaded and visited are made on the host: tile_scheduler.py and block_ranges.py.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.pipeline_gluon import next_stage
from flashkernel.core.gluon import gl, gluon, mbarrier, named_barrier_arrive, named_barrier_sync


class WorkTile(NamedTuple):
    """A tile of queries of (the first packed) head `head`; in the backward kernels a tile of keys of kv head `head`.
    `tile` is -1 after a program's last work tile."""

    tile: Any
    batch: Any
    head: Any


class TileTables(NamedTuple):
    """Int32 tables in global memory: those of `BlockRanges`, and the schedule of `tile_schedule`."""

    ranges: Any
    range_counts: Any
    loads: Any
    load_counts: Any
    schedule: Any


class BlockTables(NamedTuple):
    """Block ranges of all work tiles: what each consumer visits (`ranges`), or what the producer loads.

    `range_counts` is [rows, 3] (skipped before, visited, skipped after) for consumers, and [rows] (number of ranges)
    for the producer.
    """

    ranges: Any
    range_counts: Any
    max_ranges: Any
    batch_stride: Any
    head_stride: Any


class BlockCursor(NamedTuple):
    """Where a consumer is in its block ranges: K blocks left after this one (-1: this one does not exist either),
    offset of the range in the table, the block, the end of the range, and whether the range must be masked."""

    blocks_left: Any
    range_offset: Any
    block: Any
    block_end: Any
    masked: Any


@gluon.jit
def consumer_release_k(stage, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """A consumer has read K of a stage. With more than 4 stages there are not enough named barriers for K and V: K is
    then released with V, which is early enough so many blocks ahead."""
    if NUM_STAGES <= 4:
        named_barrier_arrive(stage, NUM_CONSUMERS)


@gluon.jit
def consumer_release_v(stage, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """A consumer has read V of a stage, and K before."""
    if NUM_STAGES <= 4:
        named_barrier_arrive(NUM_STAGES + stage, NUM_CONSUMERS)
    else:
        named_barrier_arrive(stage, NUM_CONSUMERS)


@gluon.jit
def producer_acquire_k(num_loaded, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The producer waits until all consumers have released K of the stage of block number `num_loaded`."""
    if num_loaded >= NUM_STAGES:
        named_barrier_sync(num_loaded % NUM_STAGES, NUM_CONSUMERS)


@gluon.jit
def producer_acquire_v(num_loaded, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The producer waits until all consumers have released V of a stage whose K it has acquired."""
    V_HAS_BARRIERS: gl.constexpr = NUM_STAGES <= 4
    if V_HAS_BARRIERS and num_loaded >= NUM_STAGES:
        named_barrier_sync(NUM_STAGES + num_loaded % NUM_STAGES, NUM_CONSUMERS)


@gluon.jit
def producer_drain(num_loaded, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The producer waits until all stages are released: a named barrier must not be left half full."""
    for later in gl.static_range(NUM_STAGES):
        producer_acquire_k(num_loaded + later, NUM_CONSUMERS, NUM_STAGES)
        producer_acquire_v(num_loaded + later, NUM_CONSUMERS, NUM_STAGES)


@gluon.jit
def skip_blocks(barriers, state, num_blocks, NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr):
    """Release K blocks that only the other consumers visit. Returns the position behind them."""
    while num_blocks > 0:
        stage, phase = state
        mbarrier.wait(barriers.k_full.index(stage), phase)
        consumer_release_k(stage, NUM_CONSUMERS, NUM_STAGES)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        consumer_release_v(stage, NUM_CONSUMERS, NUM_STAGES)
        state = next_stage(state, NUM_STAGES)
        num_blocks -= 1
    return state


@gluon.jit
def work_tile_at(schedule, step):
    """Returns a program's work tile number `step` from its schedule."""
    entry = schedule + step * 3
    return WorkTile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2))


@gluon.jit
def first_query(work_tile, w, seqlen_q, NUM_CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, PAD_FRONT: gl.constexpr):
    """Returns the first of the BLOCK_M queries of consumer `w`. PAD_FRONT: if the blocks of queries are not a multiple
    of NUM_CONSUMERS, the consumers without one are the first of the first work tile, which is the shortest under a
    causal mask; their first query lies behind the last one."""
    first = (work_tile.tile * NUM_CONSUMERS + w) * BLOCK_M
    if PAD_FRONT:
        blocks = (seqlen_q + BLOCK_M - 1) // BLOCK_M
        first -= (NUM_CONSUMERS - blocks % NUM_CONSUMERS) % NUM_CONSUMERS * BLOCK_M
        first = gl.where(first < 0, seqlen_q, first)
    return first


@gluon.jit
def table_row(work_tile, tables, w: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Returns the row of a work tile and consumer `w` in the block tables; some row if there is no work tile."""
    tile, batch, head = work_tile
    row = batch.to(gl.int64) * tables.batch_stride + head * tables.head_stride + gl.maximum(tile, 0)
    return row * NUM_CONSUMERS + w


@gluon.jit
def first_block(row, tables):
    """Returns (number of K blocks to skip first, cursor at the first visited K block)."""
    offset = (row * tables.max_ranges * 3).to(gl.int32)
    ranges = tables.ranges + offset
    num_visited = gl.load(tables.range_counts + row * 3 + 1)
    cursor = BlockCursor(num_visited - 1, offset, gl.load(ranges), gl.load(ranges + 1), gl.load(ranges + 2))
    return gl.load(tables.range_counts + row * 3), cursor


@gluon.jit
def next_block(range_offset, block, block_end, masked, ranges):
    """Returns (range_offset, block, block_end, masked) of the block after `block`."""
    block += 1
    if block == block_end:  # the next range
        range_offset += 3
        block = gl.load(ranges + range_offset)
        block_end = gl.load(ranges + range_offset + 1)
        masked = gl.load(ranges + range_offset + 2)
    return range_offset, block, block_end, masked


@gluon.jit
def advance(cursor, tables):
    """Returns the cursor one K block further."""
    blocks_left, range_offset, block, block_end, masked = cursor
    if blocks_left > 0:
        range_offset, block, block_end, masked = next_block(range_offset, block, block_end, masked, tables.ranges)
    return BlockCursor(blocks_left - 1, range_offset, block, block_end, masked)


@gluon.jit
def blocks_between(work_tile, following, tables, w: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
                   NUM_STAGES: gl.constexpr):  # fmt: skip
    """Returns how many K blocks consumer `w` skips between its last block of a work tile and its first of the next;
    NUM_STAGES - 1 if the two work tiles must not overlap.

    If they overlap, the consumer holds V of the last block while it waits for K of the next work tile's first two
    blocks. With NUM_STAGES - 1 skipped blocks between them, the producer could never load those; with NUM_STAGES - 2
    neither, if K is released together with V.
    """
    row = table_row(work_tile, tables, w, NUM_CONSUMERS)
    row_next = table_row(following, tables, w, NUM_CONSUMERS)
    visited = gl.load(tables.range_counts + row * 3 + 1)
    skipped_after = gl.load(tables.range_counts + row * 3 + 2)
    skipped_before = gl.load(tables.range_counts + row_next * 3)
    visited_next = gl.load(tables.range_counts + row_next * 3 + 1)
    both_visit = (visited > 0) & (visited_next > 0) & (following.tile >= 0)
    MAX_SKIPPED: gl.constexpr = NUM_STAGES - 2 if NUM_STAGES <= 4 else NUM_STAGES - 3
    skipped = skipped_after + skipped_before
    return gl.where(both_visit & (skipped <= MAX_SKIPPED), skipped, NUM_STAGES - 1)
