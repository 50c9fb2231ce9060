"""dW[g] = X_g^T dZ_g of every group g of rows on Hopper: a persistent kernel.

A work tile is BLOCK_M features of x by BLOCK_N of dz in the gradient of one group's weight; its sum goes over the rows
of the group, BLOCK_K at a time. Rows are contiguous in memory, features within them: both operands are MN-major, and
WGMMA reads them as they are. The last step of a group would reach into the next one, whose rows must not be added; the
descriptors end with the group (blocks/ragged_gluon.py), so that TMA fills in zeros.

The pipeline is that of the dense product (hopper/kernel.py). An empty group has no steps; its gradient is stored as
zeros. Work tiles are in the order of the groups: those at work at the same time share x and dz of one or two groups in
L2, and every program has its part of each group, whatever its size.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.ragged_gluon import group_coords
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    named_barrier_sync,
    new_barriers,
    specialize_warps,
    store_tile,
    synchronize,
    tma,
)
from flashkernel.ops.matmul.grouped.hopper.pipeline import multiply_tail, skip_work_tile
from flashkernel.ops.matmul.hopper.kernel import column_chunks, multiply
from flashkernel.ops.matmul.tiles_triton import tile_position

# Whether these are multiples of 16 makes no difference, and would only compile the kernel again.
SIZES = ("groups", "k", "m_tiles", "n_tiles")


class GradientTraits(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int  # of dW, per consumer: features of x
    BLOCK_N: int
    TAIL_N: int  # columns that are multiplied of the last tile of a row; 0: all BLOCK_N
    BLOCK_K: int  # rows of a group per step
    NUM_CONSUMERS: int
    NUM_STAGES: int
    GROUP_M: int  # tiles of rows of dW that are worked on at the same time
    CHUNK_N: int  # columns of a staged chunk of dW
    STORE_STAGES: int  # chunks in shared memory, per consumer
    CONSUMER_REGISTERS: int  # per thread, as PRODUCER_REGISTERS
    PRODUCER_REGISTERS: int
    A_K_MAJOR: bool = False  # what `multiply` looks at
    B_K_MAJOR: bool = False
    PINGPONG: bool = False
    INTEGER: bool = False
    SECOND_N: int = 0


class _Schedule(NamedTuple):
    """All work tiles. Groups are the outer index."""

    offsets: Any  # address of int32 [groups + 1]
    groups: Any
    m_tiles: Any
    n_tiles: Any


class _WorkTile(NamedTuple):
    group: Any
    begin: Any  # rows of the group
    end: Any
    row: Any  # of dW, in units of BLOCK_M, as column of BLOCK_N
    column: Any


class _Buffers(NamedTuple):
    """Tiles in shared memory: x by stage and consumer, dz by stage, chunks of dW by consumer."""

    a: Any
    b: Any
    c: Any


class _ProducerArgs(NamedTuple):
    x: Any  # TMA descriptors
    dz: Any
    buffers: Any
    full: Any  # mbarriers: TMA has loaded a stage
    schedule: Any


class _ConsumerArgs(NamedTuple):
    dw: Any  # TMA descriptor
    buffers: Any
    full: Any
    schedule: Any
    k: Any


@gluon.jit
def _num_work_tiles(schedule):
    return schedule.groups * schedule.m_tiles * schedule.n_tiles


@gluon.jit
def _work_tile_at(index, schedule, GROUP_M: gl.constexpr):
    """Returns work tile number `index`."""
    tiles = schedule.m_tiles * schedule.n_tiles
    group = index // tiles
    row, column = tile_position(index % tiles, schedule.m_tiles, schedule.n_tiles, GROUP_M)
    begin, end = gl.load(schedule.offsets + group), gl.load(schedule.offsets + group + 1)
    return _WorkTile(group, begin, end, row, column)


@gluon.jit
def _produce(args, TRAITS: gl.constexpr):
    """The producer warp: loads x and dz of all work tiles."""
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    x, dz = args.x, args.dz
    num_loaded = gl.to_tensor(0)
    for index in range(gl.program_id(0), _num_work_tiles(args.schedule), gl.num_programs(0)):
        tile = _work_tile_at(index, args.schedule, TRAITS.GROUP_M)
        for first in range(tile.begin, tile.end, BLOCK_K):
            stage = num_loaded % NUM_STAGES
            if num_loaded >= NUM_STAGES:
                named_barrier_sync(stage, NUM_CONSUMERS)
            full = args.full.index(stage)
            mbarrier.expect(full, NUM_CONSUMERS * x.block_type.nbytes + dz.block_type.nbytes)
            for w in gl.static_range(NUM_CONSUMERS):
                feature = (tile.row * NUM_CONSUMERS + w) * TRAITS.ROWS
                coords = group_coords(first, feature, tile.end)
                load_tile(x, coords, full, args.buffers.a.index(stage * NUM_CONSUMERS + w))
            coords = group_coords(first, tile.column * TRAITS.BLOCK_N, tile.end)
            load_tile(dz, coords, full, args.buffers.b.index(stage))
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, NUM_CONSUMERS)


@gluon.jit
def _store(acc, args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores acc [ROWS, BLOCK_N or TAIL_N] to dW chunk by chunk."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    COUNT: gl.constexpr = acc.shape[1] // CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    first_row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS
    chunks = column_chunks(acc, COUNT)
    for chunk in gl.static_range(COUNT):
        first_column = tile.column * TRAITS.BLOCK_N + chunk * CHUNK_N
        value = gl.convert_layout(chunks[chunk], LAYOUT)
        buffer = args.buffers.c.index(w * TRAITS.STORE_STAGES + chunk % TRAITS.STORE_STAGES)
        tma.store_wait(TRAITS.STORE_STAGES - 1)  # TMA has read the chunk that was staged here
        buffer.reshape([ROWS, CHUNK_N]).store(value.to(args.dw.dtype))
        fence_async_shared()
        store_tile(args.dw, [tile.group, first_row, first_column], buffer)
    if COUNT % TRAITS.STORE_STAGES != 0:  # the next work tile begins with the same buffer
        tma.store_wait(0)


@gluon.jit
def _consume(w: gl.constexpr, args, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: its rows of all work tiles."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, BLOCK_K // 4])
    position = gl.to_tensor(0)  # steps in the ring before this work tile
    for index in range(gl.program_id(0), _num_work_tiles(args.schedule), gl.num_programs(0)):
        tile = _work_tile_at(index, args.schedule, TRAITS.GROUP_M)
        steps = (tile.end - tile.begin + BLOCK_K - 1) // BLOCK_K
        if (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS >= args.k:  # behind the last row of dW
            skip_work_tile(args, position, steps, TRAITS)
        elif steps == 0:
            _store(gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT), args, tile, w, TRAITS)
        elif TRAITS.TAIL_N > 0 and tile.column == args.schedule.n_tiles - 1:
            _store(multiply_tail(args, position, steps, w, TRAITS), args, tile, w, TRAITS)
        else:
            _store(multiply(args, position, steps, w, TRAITS)[0], args, tile, w, TRAITS)
        position += steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def grouped_weight_gradient_kernel(x, dz, dw, offsets, groups, k, m_tiles, n_tiles, TRAITS: gl.constexpr):
    """dW [groups, k, n] of x [rows, k] and dz [rows, n]. All are TMA descriptors, those of x and dz ragged ones."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    a_buffers = gl.allocate_shared_memory(x.dtype, [NUM_STAGES * TRAITS.NUM_CONSUMERS] + x.block_shape, x.layout)
    b_buffers = gl.allocate_shared_memory(dz.dtype, [NUM_STAGES] + dz.block_shape, dz.layout)
    c_buffers = gl.allocate_shared_memory(
        dw.dtype, [TRAITS.NUM_CONSUMERS * TRAITS.STORE_STAGES] + dw.block_shape, dw.layout
    )
    buffers = _Buffers(a_buffers, b_buffers, c_buffers)
    full = new_barriers(NUM_STAGES, 1)
    synchronize()  # else the compiler does so in the consumers' loops, since these wait for the barriers
    schedule = _Schedule(offsets, groups, m_tiles, n_tiles)
    specialize_warps(
        _consume, (_ConsumerArgs(dw, buffers, full, schedule, k), TRAITS), TRAITS.NUM_CONSUMERS,
        TRAITS.CONSUMER_REGISTERS, _produce, (_ProducerArgs(x, dz, buffers, full, schedule), TRAITS),
        TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
