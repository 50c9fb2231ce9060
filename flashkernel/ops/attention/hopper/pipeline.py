"""Device functions of the Hopper kernels: the K/V pipeline, work tiles, and the K blocks that a consumer visits.

K and V go through a ring of NUM_STAGES stages in shared memory. TMA signals a loaded tile on an mbarrier (k_full,
v_full). Consumers release a stage through a named barrier, on which the producer warp waits before it loads the next
block there (`producer_acquire_k`, `producer_acquire_v`).

The tables that say what is loaded and visited are made on the host (tile_scheduler.py and block_ranges.py); those of
packed sequences (varlen) on the device (varlen_schedule.py). Then a work tile lies in one sequence, and TMA descriptors
are ragged: tiles end with their sequence.
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


class VarlenTile(NamedTuple):
    """A work tile of packed sequences.

    `tile` is the offset of its record, -1 after a program's last work tile. `position` is the key that its first query
    is aligned with, and `num_keys` those of its sequence. In the backward kernels `position` is the query that its
    first key is aligned with, and `num_keys` counts from that key on.
    """

    tile: Any
    head: Any
    position: Any
    num_keys: Any


class Sequence(NamedTuple):
    """The sequence of a work tile: its rows in the packed tensors, [start, end), and the tile's first row in it
    (negative: consumers in front have no rows). `block` is where its blocks of queries begin in dq_accum."""

    first: Any
    q_start: Any
    q_end: Any
    k_start: Any
    k_end: Any
    block: Any


class VarlenSchedule(NamedTuple):
    """The int32 table of packed sequences (varlen_schedule.py), and where this program's list is in it.

    The table has a list for each program, (offset of the record, first head) of each work tile, and the records.
    """

    table: Any
    work_tiles: Any


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


class BlockPosition(NamedTuple):
    """A block in a consumer's block ranges: offset of its range in the table, the block, the end of the range, and
    whether the range must be masked."""

    range_offset: Any
    block: Any
    block_end: Any
    masked: Any


class BlockCursor(NamedTuple):
    """Where a consumer is in its block ranges; K blocks left after this one (-1: this one does not exist either)."""

    blocks_left: Any
    position: Any


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


# A record of a work tile of packed sequences: first row, q_start, q_end, k_start, k_end, position, num_keys, block,
# first and end of the blocks to load; then for each consumer MAX_RANGES ranges (masked, not masked, masked) and three
# counts. Everything is behind one pointer: consumers have no registers for more.
MAX_RANGES = gl.constexpr(3)
RECORD = gl.constexpr(12)
CONSUMER = gl.constexpr(12)


@gluon.jit
def program_work_tiles(schedule, max_work_tiles, VARLEN: gl.constexpr):
    """Returns where a program's work tiles are in the schedule."""
    program = gl.program_id(0)
    if VARLEN:
        found = VarlenSchedule(schedule, program * max_work_tiles * 2)
    else:
        found = schedule + program * max_work_tiles * 3
    return found


@gluon.jit
def work_tile_at(schedule, step, VARLEN: gl.constexpr = False):
    """Returns a program's work tile number `step` from its schedule."""
    if VARLEN:
        entry = schedule.table + schedule.work_tiles + step * 2
        tile = gl.load(entry)
        record = schedule.table + gl.maximum(tile, 0)
        found = VarlenTile(tile, gl.load(entry + 1), gl.load(record + 5), gl.load(record + 6))
    else:
        entry = schedule + step * 3
        found = WorkTile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2))  # type: ignore[assignment]
    return found


@gluon.jit
def sequence_of(work_tile, schedule):
    """Returns the sequence of a work tile; anything if there is none."""
    record = schedule.table + gl.maximum(work_tile.tile, 0)
    return Sequence(gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3),
                    gl.load(record + 4), gl.load(record + 7))  # fmt: skip


@gluon.jit
def first_row(sequence, w, BLOCK_M: gl.constexpr):
    """Returns the first of the BLOCK_M queries of consumer `w` in its sequence; behind the last one if it has none."""
    first = sequence.first + w * BLOCK_M
    return gl.where(first < 0, sequence.q_end - sequence.q_start, first)


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
    """Returns the row of a work tile and consumer `w` in the block tables; some row if there is no work tile. Of packed
    sequences it is the offset of the consumer's part of the record."""
    if tables.batch_stride is None:  # packed sequences
        row = gl.maximum(work_tile.tile, 0) + (RECORD + w * CONSUMER)
    else:
        tile, batch, head = work_tile
        row = batch.to(gl.int64) * tables.batch_stride + head * tables.head_stride + gl.maximum(tile, 0)
        row = row * NUM_CONSUMERS + w
    return row


@gluon.jit
def range_offset_of(row, tables):
    """Returns where the ranges of a row begin in `tables.ranges`."""
    if tables.batch_stride is None:
        offset = row
    else:
        offset = (row * tables.max_ranges * 3).to(gl.int32)
    return offset


@gluon.jit
def range_counts_of(row, tables):
    """Returns a pointer to the counts of a row: K blocks that are skipped before, visited, and skipped after."""
    if tables.batch_stride is None:
        counts = tables.range_counts + row + MAX_RANGES * 3
    else:
        counts = tables.range_counts + row * 3
    return counts


@gluon.jit
def first_block(row, tables):
    """Returns (number of K blocks to skip first, cursor at the first visited K block)."""
    offset = range_offset_of(row, tables)
    ranges, counts = tables.ranges + offset, range_counts_of(row, tables)
    num_visited = gl.load(counts + 1)
    position = BlockPosition(offset, gl.load(ranges), gl.load(ranges + 1), gl.load(ranges + 2))
    return gl.load(counts), BlockCursor(num_visited - 1, position)


@gluon.jit
def next_block(position, ranges):
    """Returns the position of the block after this one."""
    range_offset, block, block_end, masked = position
    block += 1
    if block == block_end:  # the next range
        range_offset += 3
        block = gl.load(ranges + range_offset)
        block_end = gl.load(ranges + range_offset + 1)
        masked = gl.load(ranges + range_offset + 2)
    return BlockPosition(range_offset, block, block_end, masked)


@gluon.jit
def advance(cursor, tables):
    """Returns the cursor one K block further."""
    blocks_left, position = cursor
    if blocks_left > 0:
        position = next_block(position, tables.ranges)
    return BlockCursor(blocks_left - 1, position)


@gluon.jit
def blocks_between(work_tile, following, tables, w: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
                   NUM_STAGES: gl.constexpr):  # fmt: skip
    """Returns how many K blocks consumer `w` skips between its last block of a work tile and its first of the next;
    NUM_STAGES - 1 if the two work tiles must not overlap.

    If they overlap, the consumer holds V of the last block while it waits for K of the next work tile's first two
    blocks. With NUM_STAGES - 1 skipped blocks between them, the producer could never load those; with NUM_STAGES - 2
    neither, if K is released together with V.
    """
    counts = range_counts_of(table_row(work_tile, tables, w, NUM_CONSUMERS), tables)
    counts_next = range_counts_of(table_row(following, tables, w, NUM_CONSUMERS), tables)
    visited = gl.load(counts + 1)
    skipped_after = gl.load(counts + 2)
    skipped_before = gl.load(counts_next)
    visited_next = gl.load(counts_next + 1)
    both_visit = (visited > 0) & (visited_next > 0) & (following.tile >= 0)
    MAX_SKIPPED: gl.constexpr = NUM_STAGES - 2 if NUM_STAGES <= 4 else NUM_STAGES - 3
    skipped = skipped_after + skipped_before
    return gl.where(both_visit & (skipped <= MAX_SKIPPED), skipped, NUM_STAGES - 1)
