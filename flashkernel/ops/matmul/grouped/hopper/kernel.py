"""y = row_weights * activation(x W[g] + bias[g]) of every group g of rows on Hopper: a persistent kernel.

A producer warp loads tiles of x and W by TMA into a ring of stages; NUM_CONSUMERS warpgroups multiply them by WGMMA.
The pipeline is that of the dense product (hopper/kernel.py); what differs is the schedule and the epilogue:

1. A work tile is BLOCK_M rows of one group by BLOCK_N columns of its weight (schedule.py). The last row tile of a group
   reads rows of the next group as well. Their products are not stored.
2. Consumer w has rows w ROWS to (w + 1) ROWS of a work tile. Where the group ends before them, nothing is loaded for
   it, and it only releases the stages: a group's rows are rounded up to ROWS, not to BLOCK_M.
3. The epilogue goes through the accumulator in chunks of columns. A chunk is converted to a layout in which a thread
   has 16 bytes of a row, and stored to the row that `scatter` says. TMA would store rows of the next group as well.
4. Rows behind the last group have no product; they are stored as zeros.

GATE "interleaved": columns 2 j and 2 j + 1 of the product are gate and up of output column j; a thread has both.
GATE "halves": gate and up of a work tile are BLOCK_N / 2 columns each, n / 2 columns apart; each has an accumulator.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.blocks.pipeline_gluon import PipelineState, next_stage
from flashkernel.core.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    new_barriers,
    specialize_warps,
    synchronize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.matmul.grouped.hopper.schedule import advance, column_tile, start_schedule
from flashkernel.ops.matmul.hopper.kernel import column_chunks, multiply

# Whether these are multiples of 16 makes no difference, and would only compile the kernel again.
SIZES = ("rows", "groups", "n_tiles", "k_blocks")


class GroupedTraits(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int  # of y, per consumer
    BLOCK_N: int  # columns of the product in a work tile
    BLOCK_K: int
    NUM_CONSUMERS: int
    NUM_STAGES: int
    CHUNK_N: int  # columns of the product that the epilogue works on at a time
    GROUPS: int  # a power of two, larger than the number of groups
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    GATE: str  # "", "halves" or "interleaved"
    ACTIVATION: str  # a piece of an epilogue, or ""
    SCALED: bool  # fp8 operands: the sum is multiplied by x_scale[row] * weight_scale[group, column]
    CONSUMER_REGISTERS: int  # per thread, as PRODUCER_REGISTERS
    PRODUCER_REGISTERS: int
    PINGPONG: bool = False  # what `multiply` looks at
    INTEGER: bool = False
    SECOND_N: int = 0


class GroupedEpilogue(NamedTuple):
    """Addresses and strides (in elements) of what the epilogue reads and writes. What is not given is None."""

    y: Any  # [out_rows, columns], contiguous
    preactivation: Any  # [rows, n], contiguous
    scatter: Any
    row_weights: Any
    bias: Any
    bias_strides: Any  # (group, column)
    x_scale: Any
    x_scale_stride: Any
    weight_scale: Any
    weight_scale_strides: Any  # (group, column)
    n: Any  # columns of the product
    columns: Any  # of y: n, or with a gate n / 2


class _ProducerArgs(NamedTuple):
    x: Any  # TMA descriptors
    weights: Any
    buffers: Any
    full: Any  # mbarriers: TMA has loaded a stage
    schedule: Any
    k_blocks: Any
    columns: Any


class _ConsumerArgs(NamedTuple):
    buffers: Any
    full: Any
    schedule: Any
    k_blocks: Any
    epilogue: Any


class _Buffers(NamedTuple):
    """Tiles in shared memory: A by stage and consumer, B by stage, with GATE "halves" by stage and half."""

    a: Any
    b: Any


@gluon.jit
def _produce(args, TRAITS: gl.constexpr):
    """The producer warp: loads x and W of all work tiles."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    NUM_CONSUMERS: gl.constexpr = TRAITS.NUM_CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * NUM_CONSUMERS
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    x, weights, schedule = args.x, args.weights, args.schedule
    cursor = schedule.first
    num_loaded = gl.to_tensor(0)
    for index in range(gl.program_id(0), schedule.num_work_tiles, gl.num_programs(0)):
        row_tile = index // schedule.n_tiles
        cursor = advance(cursor, row_tile, schedule, BLOCK_M)
        first_row = cursor.begin + (row_tile - cursor.tiles_before) * BLOCK_M
        column = column_tile(index, row_tile, schedule.n_tiles) * (TRAITS.BLOCK_N // HALVES)
        k_blocks = gl.where(cursor.group < schedule.groups, args.k_blocks, 0)
        active = gl.minimum((cursor.end - first_row + ROWS - 1) // ROWS, NUM_CONSUMERS)  # consumers with rows
        for block in range(k_blocks):
            stage = num_loaded % NUM_STAGES
            if num_loaded >= NUM_STAGES:
                named_barrier_sync(stage, NUM_CONSUMERS)
            full = args.full.index(stage)
            for count in gl.static_range(1, NUM_CONSUMERS + 1):
                if active == count:
                    mbarrier.expect(full, count * x.block_type.nbytes + HALVES * weights.block_type.nbytes)
            for w in gl.static_range(NUM_CONSUMERS):
                if w < active:
                    row = first_row + w * ROWS
                    place = [0, row, block * BLOCK_K] if TRAITS.A_K_MAJOR else [0, block * BLOCK_K, row]
                    load_tile(x, place, full, args.buffers.a.index(stage * NUM_CONSUMERS + w))
            for half in gl.static_range(HALVES):
                first = column + half * args.columns
                place = [cursor.group, first, block * BLOCK_K] if TRAITS.B_K_MAJOR else [
                    cursor.group, block * BLOCK_K, first]  # fmt: skip
                load_tile(weights, place, full, args.buffers.b.index(stage * HALVES + half))
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, NUM_CONSUMERS)


@gluon.jit
def _multiply_gate_up(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sums of gate and up, [ROWS, BLOCK_N / 2] each; `multiply` with two accumulators."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    HALF: gl.constexpr = TRAITS.BLOCK_N // 2
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, BLOCK_K // 4])
    gate = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    up = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    previous = state.stage
    for block in range(num_blocks):
        stage, phase = state
        mbarrier.wait(args.full.index(stage), phase)
        a_tile = args.buffers.a.index(stage * TRAITS.NUM_CONSUMERS + w)
        if TRAITS.A_K_MAJOR:
            a = a_tile.reshape([ROWS, BLOCK_K])
        else:
            a = a_tile.reshape([BLOCK_K, ROWS]).permute((1, 0))
        gate = warpgroup_mma(a, _half(args, stage, 0, TRAITS), gate, is_async=True)
        up = warpgroup_mma(a, _half(args, stage, 1, TRAITS), up, is_async=True)
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        if block > 0:
            named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
        previous = stage
        state = next_stage(state, NUM_STAGES)
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
    return gate, up


@gluon.jit
def _half(args, stage, half: gl.constexpr, TRAITS: gl.constexpr):
    """Returns gate's (0) or up's (1) tile [BLOCK_K, BLOCK_N / 2] of W."""
    HALF: gl.constexpr = TRAITS.BLOCK_N // 2
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    tile = args.buffers.b.index(stage * 2 + half)
    if TRAITS.B_K_MAJOR:
        return tile.reshape([HALF, BLOCK_K]).permute((1, 0))
    else:
        return tile.reshape([BLOCK_K, HALF])


@gluon.jit
def _release_unread(args, position, num_blocks, TRAITS: gl.constexpr):
    """Releases the stages of a work tile in which this consumer has no rows."""
    state = PipelineState(position % TRAITS.NUM_STAGES, (position // TRAITS.NUM_STAGES) & 1)
    for _ in range(num_blocks):
        mbarrier.wait(args.full.index(state.stage), state.phase)
        named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
        state = next_stage(state, TRAITS.NUM_STAGES)


@gluon.jit
def _store_rows(target, value, index, first_row, end, first_column, width, row_stride):
    """Stores value [rows, columns] to the rows of target that `index` names, 16 bytes of a row at a time."""
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    EACH: gl.constexpr = 8 if COLUMNS > 8 else COLUMNS  # 16 bytes of 16-bit elements, two times 16 of 32-bit ones
    ACROSS: gl.constexpr = COLUMNS // EACH if COLUMNS // EACH < 32 else 32  # threads along a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inside = row < end
    if index is None:
        place = row.to(gl.int64)
    else:
        place = gl.load(index + row, mask=inside, other=0).to(gl.int64)
    rounded = gl.convert_layout(value.to(target.dtype.element_ty), LAYOUT)
    gl.store(
        target + place[:, None] * row_stride + column[None, :], rounded,
        mask=inside[:, None] & (column < width)[None, :],
    )  # fmt: skip


@gluon.jit
def _scaled_and_biased(
    value, ep, group, first_row, end, column, in_columns, LAYOUT: gl.constexpr, SCALED: gl.constexpr
):
    """Returns value [rows, columns], a sum, times its scales, plus its bias."""
    if SCALED:
        row = first_row + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
        x_scale = gl.load(ep.x_scale + row * ep.x_scale_stride, mask=row < end, other=0.0)
        scales = ep.weight_scale + group * ep.weight_scale_strides[0]
        weight_scale = gl.load(scales + column * ep.weight_scale_strides[1], mask=in_columns, other=0.0)
        value = value * x_scale[:, None] * weight_scale[None, :]
    if ep.bias is not None:
        biases = ep.bias + group.to(gl.int64) * ep.bias_strides[0]
        value += gl.load(biases + column * ep.bias_strides[1], mask=in_columns, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def _weighted(value, row_weights, first_row, end):
    """Returns value [rows, columns] times the weight of each row."""
    LAYOUT: gl.constexpr = value.type.layout
    row = first_row + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    return value * gl.load(row_weights + row, mask=row < end, other=0.0)[:, None]


@gluon.jit
def _store_epilogue(acc, up_acc, args, cursor, first_row, tile_column, TRAITS: gl.constexpr):
    """Stores epilogue(acc) chunk by chunk. `up_acc` is looked at with GATE "halves"."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    WIDTH: gl.constexpr = TRAITS.BLOCK_N // 2 if TRAITS.GATE == "halves" else TRAITS.BLOCK_N
    COUNT: gl.constexpr = WIDTH // CHUNK_N
    ACTIVATION: gl.constexpr = TRAITS.ACTIVATION
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    ep, end = args.epilogue, cursor.end
    chunks, up_chunks = column_chunks(acc, COUNT), column_chunks(up_acc, COUNT)
    for chunk in gl.static_range(COUNT):
        first_column = tile_column * WIDTH + chunk * CHUNK_N
        column = first_column + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
        in_columns = column < (ep.columns if TRAITS.GATE == "halves" else ep.n)
        value = gl.convert_layout(chunks[chunk], LAYOUT)
        value = _scaled_and_biased(
            value, ep, cursor.group, first_row, end, column, in_columns, LAYOUT, TRAITS.SCALED
        )  # fmt: skip
        up = value
        if TRAITS.GATE == "halves":
            up = gl.convert_layout(up_chunks[chunk], LAYOUT)
            up = _scaled_and_biased(
                up, ep, cursor.group, first_row, end, column + ep.columns, in_columns, LAYOUT, TRAITS.SCALED
            )  # fmt: skip
        if ep.preactivation is not None:
            _store_preactivation(value, up, ep, first_row, end, first_column, TRAITS)
        if TRAITS.GATE == "interleaved":
            value, up = gl.split(value.reshape([ROWS, CHUNK_N // 2, 2]))
            first_column = first_column // 2
        if ACTIVATION != "":
            value = apply_epilogue(
                value, up, first_row, column, column, in_columns, in_columns, ep.bias, ep.bias, 0, ep.bias, 0,
                ACTIVATION,
            )  # fmt: skip
        if ep.row_weights is not None:
            value = _weighted(value, ep.row_weights, first_row, end)
        _store_rows(ep.y, value, ep.scatter, first_row, end, first_column, ep.columns, ep.columns)


@gluon.jit
def _store_preactivation(value, up, ep, first_row, end, first_column, TRAITS: gl.constexpr):
    """Stores a chunk of what goes into the activation, by rows of the groups."""
    if TRAITS.GATE == "halves":  # two matrices of n / 2 columns side by side
        _store_rows(ep.preactivation, value, None, first_row, end, first_column, ep.columns, ep.n)
        _store_rows(ep.preactivation + ep.columns, up, None, first_row, end, first_column, ep.columns, ep.n)
    else:
        _store_rows(ep.preactivation, value, None, first_row, end, first_column, ep.n, ep.n)


@gluon.jit
def _store_zeros(ep, cursor, first_row, tile_column, TRAITS: gl.constexpr):
    """Stores zeros to the rows of a work tile behind the last group."""
    ROWS: gl.constexpr = TRAITS.ROWS
    COLUMNS: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = TRAITS.BLOCK_N if TRAITS.GATE == "" else TRAITS.BLOCK_N // 2
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    for first_column in range(tile_column * WIDTH, (tile_column + 1) * WIDTH, COLUMNS):
        _store_rows(ep.y, zeros, ep.scatter, first_row, cursor.end, first_column, ep.columns, ep.columns)


@gluon.jit
def _consume(w: gl.constexpr, args, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: rows w ROWS to (w + 1) ROWS of all work tiles."""
    BLOCK_M: gl.constexpr = TRAITS.ROWS * TRAITS.NUM_CONSUMERS
    schedule, k_blocks = args.schedule, args.k_blocks
    cursor = schedule.first
    position = gl.to_tensor(0)  # K blocks in the ring before this work tile
    for index in range(gl.program_id(0), schedule.num_work_tiles, gl.num_programs(0)):
        row_tile = index // schedule.n_tiles
        cursor = advance(cursor, row_tile, schedule, BLOCK_M)
        first_row = cursor.begin + (row_tile - cursor.tiles_before) * BLOCK_M + w * TRAITS.ROWS
        tile_column = column_tile(index, row_tile, schedule.n_tiles)
        if cursor.group < schedule.groups:
            if first_row < cursor.end:
                if TRAITS.GATE == "halves":
                    gate, up = _multiply_gate_up(args, position, k_blocks, w, TRAITS)
                    _store_epilogue(gate, up, args, cursor, first_row, tile_column, TRAITS)
                else:
                    (acc,) = multiply(args, position, k_blocks, w, TRAITS)
                    _store_epilogue(acc, acc, args, cursor, first_row, tile_column, TRAITS)
            else:
                _release_unread(args, position, k_blocks, TRAITS)
            position += k_blocks
        else:
            _store_zeros(args.epilogue, cursor, first_row, tile_column, TRAITS)


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def grouped_matmul_kernel(
    x, weights, offsets, y, preactivation, scatter, row_weights, bias, bias_strides, x_scale, x_scale_stride,
    weight_scale, weight_scale_strides, n, columns, rows, groups, n_tiles, k_blocks, TRAITS: gl.constexpr,
):  # fmt: skip
    """y [out_rows, columns]. x [1, rows, K] and weights [groups, K, n] are TMA descriptors."""
    BLOCK_M: gl.constexpr = TRAITS.ROWS * TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    buffers = _Buffers(
        gl.allocate_shared_memory(x.dtype, [NUM_STAGES * TRAITS.NUM_CONSUMERS] + x.block_shape, x.layout),
        gl.allocate_shared_memory(weights.dtype, [NUM_STAGES * HALVES] + weights.block_shape, weights.layout),
    )
    full = new_barriers(NUM_STAGES, 1)
    schedule = start_schedule(offsets, groups, rows, n_tiles, BLOCK_M, TRAITS.GROUPS)
    synchronize()  # else the compiler does so in the consumers' loops, since these wait for the barriers
    epilogue = GroupedEpilogue(
        y, preactivation, scatter, row_weights, bias, bias_strides, x_scale, x_scale_stride, weight_scale,
        weight_scale_strides, n, columns,
    )  # fmt: skip
    specialize_warps(
        _consume, (_ConsumerArgs(buffers, full, schedule, k_blocks, epilogue), TRAITS), TRAITS.NUM_CONSUMERS,
        TRAITS.CONSUMER_REGISTERS, _produce, (_ProducerArgs(x, weights, buffers, full, schedule, k_blocks, columns),
        TRAITS), TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
