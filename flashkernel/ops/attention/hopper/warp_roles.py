"""The warp-specialized skeleton of the Hopper kernels over query tiles: one producer warp, several consumers.

These are the forward kernels, 16-bit and FP8, and the kernel of dQ alone (backward_dq_kernel.py).

A program is persistent: it stays on its SM and takes one work tile after another from its schedule. The producer warp
(`produce`) loads Q, K and V by TMA and runs ahead of the consumers, into the next work tile as well. Every consumer
warpgroup (`consume`) computes 64 rows of each work tile. With OVERFLOW_RETRY all of them go through the flagged work
tiles once more (overflow_retry.py).

The kernels differ in their layouts of K and V, and in the function PROCESS by which a consumer processes work tiles.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.pipeline_gluon import PipelineState
from flashkernel.blocks.ragged_gluon import head_coords
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    new_barriers,
    specialize_warps,
    store_tile,
    synchronize,
    tma,
)
from flashkernel.ops.attention.hopper.head_split import issue_over_columns, store_columns
from flashkernel.ops.attention.hopper.overflow_retry import any_flagged, clear_flags, next_work_tile, stores_done
from flashkernel.ops.attention.hopper.pipeline import (
    BlockTables,
    first_query,
    first_row,
    producer_acquire_k,
    producer_acquire_v,
    producer_drain,
    program_work_tiles,
    sequence_of,
    table_row,
)


class Buffers(NamedTuple):
    """Tiles in shared memory: Q [Q_STAGES * NUM_CONSUMERS], K and V [NUM_STAGES], O [NUM_CONSUMERS]."""

    q: Any
    k: Any
    v: Any
    o: Any


class Barriers(NamedTuple):
    """mbarriers. `full`: TMA has loaded a tile; `q_empty`: a consumer has read its Q for the last time;
    `first_pass_done`: all consumers are through their work tiles and may look at the retry flags."""

    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    first_pass_done: Any


class TableSizes(NamedTuple):
    """Sizes of the tables: ranges per row, entries of a program's schedule, rows between batch entries and heads."""

    max_ranges: Any
    max_loads: Any
    batch_stride: Any
    head_stride: Any
    max_work_tiles: Any


class ProducerArgs(NamedTuple):
    """TMA descriptors of Q, K and V, where to load them, and which blocks each work tile needs."""

    q: Any
    k: Any
    v: Any
    buffers: Any
    barriers: Any
    work_tiles: Any
    retry_flags: Any
    tables: Any  # `BlockTables` of what is loaded
    group_size: Any
    seqlen_q: Any
    do: Any = None  # TMA descriptor of dO; of the kernel of dQ


class ConsumerArgs(NamedTuple):
    """Everything that a consumer reads or writes."""

    o: Any  # TMA descriptor
    lse: Any
    sinks: Any
    buffers: Any
    barriers: Any
    work_tiles: Any  # of this program
    retry_flags: Any  # of this program
    tables: Any  # `BlockTables` of what is visited
    heads: Any
    scores: Any  # `ScoreParams`
    descales: Any = None  # of the FP8 kernel
    delta: Any = None  # of the kernel of dQ


@gluon.jit
def _new_pipeline_barriers(TRAITS: gl.constexpr):
    """Allocates and initializes the mbarriers."""
    NUM_Q: gl.constexpr = TRAITS.Q_STAGES * TRAITS.NUM_CONSUMERS
    q_full = new_barriers(NUM_Q, 1)
    q_empty = new_barriers(NUM_Q, 1)
    k_full = new_barriers(TRAITS.NUM_STAGES, 1)
    v_full = new_barriers(TRAITS.NUM_STAGES, 1)
    return Barriers(q_full, q_empty, k_full, v_full, new_barriers(1, TRAITS.NUM_CONSUMERS))


@gluon.jit
def q_slot(num_tiles, w, TRAITS: gl.constexpr):
    """Returns (Q buffer of consumer `w`, its phase) for work tile number `num_tiles` of the program."""
    slot = num_tiles % TRAITS.Q_STAGES * TRAITS.NUM_CONSUMERS + w
    return slot, (num_tiles // TRAITS.Q_STAGES) & 1


@gluon.jit
def _load_ranges(work_tile, tables):
    """Returns (number of block ranges to load for a work tile, where they are, first block and end of the first)."""
    if tables.batch_stride is None:  # packed sequences: one range, which may be empty
        ranges = tables.ranges + gl.maximum(work_tile.tile, 0) + 8
        num_ranges = gl.to_tensor(1)
    else:
        row = table_row(work_tile, tables, 0, 1)
        ranges = tables.ranges + row * tables.max_ranges * 3
        num_ranges = gl.load(tables.range_counts + row)
    return num_ranges, ranges, gl.load(ranges), gl.load(ranges + 1)


@gluon.jit
def _load_q(args, work_tile, sequence, num_tiles, TRAITS: gl.constexpr):
    """Loads Q of a work tile, once the consumers have released the buffers. `sequence` is None unless VARLEN."""
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    for w in gl.static_range(NUM_CONSUMERS):
        slot, phase = q_slot(num_tiles, w, TRAITS)
        mbarrier.wait(args.barriers.q_empty.index(slot), phase ^ 1)
        full = args.barriers.q_full.index(slot)
        if TRAITS.VARLEN:
            first = sequence.q_start + first_row(sequence, w, 64 // TRAITS.PACK_GQA)
            coords = head_coords(first, work_tile.head, sequence.q_end)
        else:
            first = first_query(work_tile, w, args.seqlen_q, NUM_CONSUMERS, 64 // TRAITS.PACK_GQA, TRAITS.PAD_FRONT)
            coords = [work_tile.batch, first, work_tile.head, 0]
        if args.do is None:
            mbarrier.expect(full, args.q.block_type.nbytes)
        else:
            mbarrier.expect(full, args.q.block_type.nbytes + args.do.block_type.nbytes)
            load_tile(args.do, coords, full, args.buffers.o.index(slot))
        load_tile(args.q, coords, full, args.buffers.q.index(slot))


@gluon.jit
def _load_kv(args, batch, kv_head, block, num_loaded, TRAITS: gl.constexpr):
    """Loads K and V of a block into the next stage, each once the consumers have released it. With VARLEN, `batch` is
    the sequence."""
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    stage = num_loaded % NUM_STAGES
    producer_acquire_k(num_loaded, NUM_CONSUMERS, NUM_STAGES)
    k_full = args.barriers.k_full.index(stage)
    mbarrier.expect(k_full, args.k.block_type.nbytes)
    if TRAITS.FP8:  # (batch, pair, quad, one, heads and dims): key = 4 quad + 2 pair + one
        k_coords = [batch, 0, block * (BLOCK_N // 4), 0, kv_head * TRAITS.HEAD_DIM]
    elif TRAITS.VARLEN:
        k_coords = head_coords(batch.k_start + block * BLOCK_N, kv_head, batch.k_end)
    else:
        k_coords = [batch, block * BLOCK_N, kv_head, 0]
    load_tile(args.k, k_coords, k_full, args.buffers.k.index(stage))
    producer_acquire_v(num_loaded, NUM_CONSUMERS, NUM_STAGES)
    v_full = args.barriers.v_full.index(stage)
    mbarrier.expect(v_full, args.v.block_type.nbytes)
    if TRAITS.FP8:  # V^T
        v_coords = [batch, kv_head, 0, block * BLOCK_N]
    elif TRAITS.VARLEN:
        v_coords = k_coords
    else:
        v_coords = [batch, block * BLOCK_N, kv_head, 0]
    load_tile(args.v, v_coords, v_full, args.buffers.v.index(stage))


@gluon.jit
def _produce_work_tiles(args, num_loaded, num_tiles, TRAITS: gl.constexpr, RETRY: gl.constexpr):
    """Loads all work tiles, or with RETRY the flagged ones. Reads the tables of the next work tile before it loads this
    one. Returns (K blocks, work tiles) loaded so far."""
    VARLEN: gl.constexpr = TRAITS.VARLEN
    step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, 0, RETRY, VARLEN)
    num_ranges, ranges, block_begin, block_end = _load_ranges(work_tile, args.tables)
    while work_tile.tile >= 0:
        this_tile = work_tile
        if VARLEN:
            sequence = sequence_of(this_tile, args.work_tiles)
            batch = sequence
        else:
            sequence = None
            batch = this_tile.batch
        step, work_tile = next_work_tile(args.work_tiles, args.retry_flags, step + 1, RETRY, VARLEN)
        next_num_ranges, next_ranges, next_begin, next_end = _load_ranges(work_tile, args.tables)
        _load_q(args, this_tile, sequence, num_tiles, TRAITS)
        kv_head = this_tile.head // args.group_size
        for index in range(num_ranges):
            begin, end = block_begin, block_end
            if index > 0:
                begin, end = gl.load(ranges + index * 3), gl.load(ranges + index * 3 + 1)
            for block in range(begin, end):
                _load_kv(args, batch, kv_head, block, num_loaded, TRAITS)
                num_loaded += 1
        num_ranges, ranges, block_begin, block_end = next_num_ranges, next_ranges, next_begin, next_end
        num_tiles += 1
    return num_loaded, num_tiles


@gluon.jit
def produce(args, TRAITS: gl.constexpr):
    """The producer warp."""
    zero = gl.to_tensor(0)
    num_loaded, num_tiles = _produce_work_tiles(args, zero, zero, TRAITS, False)
    if TRAITS.OVERFLOW_RETRY:
        flagged = any_flagged(args.retry_flags, args.barriers.first_pass_done)
        if flagged:
            num_loaded, num_tiles = _produce_work_tiles(args, num_loaded, num_tiles, TRAITS, True)
    producer_drain(num_loaded, TRAITS.NUM_CONSUMERS, TRAITS.NUM_STAGES)


@gluon.jit
def consume(w: gl.constexpr, args, PROCESS: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: all work tiles, then the flagged ones again with the online softmax.

    PROCESS(w, args, state, num_tiles, MASK, TRAITS, RETRY) computes 64 rows of all (flagged) work tiles; it starts at
    `state` in the K/V ring and returns where it ends, and the number of work tiles so far.
    """
    zero = gl.to_tensor(0)
    state, num_tiles = PROCESS(w, args, PipelineState(zero, zero), zero, MASK, TRAITS, False)
    if TRAITS.OVERFLOW_RETRY:
        stores_done(args.barriers.first_pass_done)
        flagged = any_flagged(args.retry_flags, args.barriers.first_pass_done)
        if flagged:
            PROCESS(w, args, state, num_tiles, MASK, TRAITS, True)
    tma.store_wait(0)


@gluon.jit
def query_coords(work_tile, schedule, seqlen_q, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the TMA coordinates of consumer `w`'s rows of a work tile."""
    if TRAITS.VARLEN:
        sequence = sequence_of(work_tile, schedule)
        first = sequence.q_start + first_row(sequence, w, 64 // TRAITS.PACK_GQA)
        coords = head_coords(first, work_tile.head, sequence.q_end)
    else:
        first = first_query(
            work_tile, w, seqlen_q, TRAITS.NUM_CONSUMERS, 64 // TRAITS.PACK_GQA, TRAITS.PAD_FRONT
        )  # fmt: skip
        coords = [work_tile.batch, first, work_tile.head, 0]
    return coords


@gluon.jit
def store_o(o, args, work_tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores 64 rows of O by TMA. Unless O shares its buffer with Q, the last work tile's store must have read it."""
    if not TRAITS.REUSE_Q_FOR_O:
        tma.store_wait(0)
    buffer = args.buffers.o.index(w)
    store_columns(buffer.reshape([64, TRAITS.VALUE_DIM]), o, TRAITS.VALUE_DIM, TRAITS.VALUE_TAIL)
    fence_async_shared()
    coords = query_coords(work_tile, args.work_tiles, args.scores.seqlen_q, w, TRAITS)
    store_tile(args.o, coords, buffer)


@gluon.jit
def issue_s(q_tile, k_buffers, stage, zeros, TRAITS: gl.constexpr):
    """Issues S = Q K^T, [64, BLOCK_N]."""
    k_tile = k_buffers.index(stage).reshape([TRAITS.BLOCK_N, TRAITS.HEAD_DIM])
    return issue_over_columns(q_tile, k_tile, zeros, False, TRAITS.HEAD_DIM, TRAITS.HEAD_TAIL)


@gluon.jit
def run_warp_roles(
    q, k, v, o, lse, sinks, buffers, retry_flags, tables, sizes, heads, group_size, scores, descales,
    PROCESS: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr, do=None, delta=None,
):  # fmt: skip
    """A kernel's body behind its shared-memory buffers: initializes barriers and flags, then runs the producer warp and
    the consumer warpgroups.

    Args:
        q, k, v, o: TMA descriptors.
        retry_flags: Of all programs, [programs, max_work_tiles].
        tables: `TileTables`, with their `TableSizes` in sizes.
        scores: `ScoreParams`.
        descales, delta: Passed on to PROCESS.
        PROCESS: What a consumer does with its work tiles (`consume`).
        do: TMA descriptor of dO, if it is loaded beside Q, into the buffers of O.
    """
    barriers = _new_pipeline_barriers(TRAITS)
    first_work_tile = gl.program_id(0) * sizes.max_work_tiles
    if TRAITS.OVERFLOW_RETRY:
        retry_flags += first_work_tile
        clear_flags(retry_flags, sizes.max_work_tiles)
    synchronize()  # else the compiler does so in the first consumer's loops, since these wait for the barriers
    work_tiles = program_work_tiles(tables.schedule, sizes.max_work_tiles, TRAITS.VARLEN)
    if TRAITS.VARLEN:
        loads = BlockTables(tables.schedule, tables.schedule, None, None, None)
        visits = loads
    else:
        strides = (sizes.batch_stride, sizes.head_stride)
        loads = BlockTables(tables.loads, tables.load_counts, sizes.max_loads, *strides)
        visits = BlockTables(tables.ranges, tables.range_counts, sizes.max_ranges, *strides)
    producer_args = ProducerArgs(
        q, k, v, buffers, barriers, work_tiles, retry_flags, loads, group_size, scores.seqlen_q, do
    )  # fmt: skip
    consumer_args = ConsumerArgs(
        o, lse, sinks, buffers, barriers, work_tiles, retry_flags, visits, heads, scores, descales, delta
    )  # fmt: skip
    specialize_warps(
        consume, (consumer_args, PROCESS, MASK, TRAITS), TRAITS.NUM_CONSUMERS, TRAITS.CONSUMER_REGISTERS,
        produce, (producer_args, TRAITS), TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
