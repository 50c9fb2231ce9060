"""The producer of grouped products whose rows of x are gathered: cp.async for x, TMA for the weights.

Hopper's TMA gathers no rows. A producer warpgroup copies them by cp.async, 16 bytes per thread at a time, into the
swizzled layout that WGMMA reads; its first warp waits for consumers and issues the TMA loads of the weights. Copies of
a stage are awaited DISTANCE stages later. Then a fence makes them visible to WGMMA, and the stage is signalled: it
counts one arrival for the weights and one for x. A consumer releases a stage when it has issued the product of the next
one, so that DISTANCE is at most NUM_STAGES - 2. K is a multiple of BLOCK_K: cp.async would not fill in zeros behind it.
"""

from flashkernel.core.gluon import (
    async_copy,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier_sync_warpgroup,
    synchronize,
)
from flashkernel.ops.matmul.grouped.hopper.schedule import load_weights, work_tile


@gluon.jit
def _row_addresses(args, first_row, end, LAYOUT: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the addresses [ROWS, 1] of the gathered rows; those behind the group's end are its last row's."""
    row = first_row + gl.arange(0, TRAITS.ROWS, gl.SliceLayout(1, LAYOUT))
    token = gl.load(args.gather + gl.minimum(row, end - 1))
    return args.x + (token.to(gl.int64) * args.x_stride)[:, None]


@gluon.jit
def _copy_rows(addresses, block, buffer, LAYOUT: gl.constexpr, TRAITS: gl.constexpr):
    """Issues the copies of columns block * BLOCK_K to (block + 1) * BLOCK_K of the rows."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    column = block * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    copy_async(buffer.reshape([ROWS, BLOCK_K]), addresses + column[None, :])


@gluon.jit
def _signal(args, loaded, NUM_STAGES: gl.constexpr):
    """Signals the stage of load number `loaded`, whose copies this thread has awaited."""
    fence_async_shared()
    synchronize()  # one thread arrives for all
    mbarrier.arrive(args.full.index(loaded % NUM_STAGES), count=1)


@gluon.jit
def produce_gathered(args, TRAITS: gl.constexpr):
    """The producer warpgroup: loads x and W of all work tiles."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    DISTANCE: gl.constexpr = TRAITS.DISTANCE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // 8], [4, 8], [4, 1], [1, 0])
    weights, schedule = args.weights, args.schedule
    cursor = schedule.first
    num_loaded = gl.to_tensor(0)
    for index in range(schedule.first_work_tile, schedule.num_work_tiles, gl.num_programs(0)):
        tile = work_tile(index, cursor, schedule, TRAITS)
        cursor, first_row, column = tile.cursor, tile.first_row, tile.column
        k_blocks = gl.where(cursor.group < schedule.groups, args.k_blocks, 0)
        addresses = _row_addresses(args, first_row, cursor.end, LAYOUT, TRAITS)
        others = addresses
        if NUM_CONSUMERS > 1:
            others = _row_addresses(args, first_row + ROWS, cursor.end, LAYOUT, TRAITS)
        both = first_row + ROWS < cursor.end  # whether the second consumer has rows
        for block in range(k_blocks):
            stage = num_loaded % NUM_STAGES
            if num_loaded >= NUM_STAGES:
                named_barrier_sync_warpgroup(stage, NUM_CONSUMERS)
            full = args.full.index(stage)
            mbarrier.expect(full, HALVES * weights.block_type.nbytes)
            load_weights(args, cursor.group, column, block, stage, full, TRAITS)
            _copy_rows(addresses, block, args.buffers.a.index(stage * NUM_CONSUMERS), LAYOUT, TRAITS)
            if NUM_CONSUMERS > 1 and both:
                second = args.buffers.a.index(stage * NUM_CONSUMERS + 1)
                _copy_rows(others, block, second, LAYOUT, TRAITS)
            async_copy.commit_group()
            async_copy.wait_group(DISTANCE)
            if num_loaded >= DISTANCE:
                _signal(args, num_loaded - DISTANCE, NUM_STAGES)
            num_loaded += 1
    async_copy.wait_group(0)
    for later in gl.static_range(DISTANCE):
        if num_loaded >= DISTANCE - later:
            _signal(args, num_loaded - DISTANCE + later, NUM_STAGES)
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync_warpgroup((num_loaded + later) % NUM_STAGES, NUM_CONSUMERS)
