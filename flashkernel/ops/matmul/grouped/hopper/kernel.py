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

TAIL_N: where the last work tile of a row has at most half of its columns, products as narrow as that are issued for it.

GATE "interleaved": columns 2 j and 2 j + 1 of the product are gate and up of output column j; a thread has both.
GATE "halves": gate and up of a work tile are BLOCK_N / 2 columns each, n / 2 columns apart; each has an accumulator.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.core.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    named_barrier_sync,
    new_barriers,
    specialize_warps,
    synchronize,
)
from flashkernel.ops.matmul.grouped.hopper.gather import produce_gathered
from flashkernel.ops.matmul.grouped.hopper.pipeline import multiply_gate_up, multiply_tail, skip_work_tile
from flashkernel.ops.matmul.grouped.hopper.schedule import advance, column_tile, load_weights, start_schedule, work_tile
from flashkernel.ops.matmul.hopper.kernel import column_chunks, multiply

# Whether these are multiples of 16 makes no difference, and would only compile the kernel again.
SIZES = ("rows", "groups", "n_tiles", "k_blocks")


class GroupedTraits(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int  # of y, per consumer
    BLOCK_N: int  # columns of the product in a work tile
    TAIL_N: int  # columns that are multiplied of the last one; 0: all BLOCK_N
    BLOCK_K: int
    NUM_CONSUMERS: int
    NUM_STAGES: int
    CHUNK_N: int  # columns of the product that the epilogue works on at a time
    GROUPS: int  # a power of two, larger than the number of groups
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    GATE: str  # "", "halves" or "interleaved"
    ACTIVATION: str  # a piece of an epilogue, or ""
    GATHERED: bool  # x is an address, and `gather` says which rows of it are multiplied (gather.py)
    SCALED: bool  # fp8 operands: the sum is multiplied by x_scale[row] * weight_scale[group, column]
    CONSUMER_REGISTERS: int  # per thread, as PRODUCER_REGISTERS
    PRODUCER_REGISTERS: int
    DISTANCE: int = 0  # GATHERED: stages whose copies are under way when another one's are issued
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
    bias_group_stride: Any
    bias_column_stride: Any
    x_scale: Any
    x_scale_stride: Any
    weight_scale: Any
    weight_scale_group_stride: Any
    weight_scale_column_stride: Any
    n: Any  # columns of the product
    columns: Any  # of y: n, or with a gate n / 2


class _ProducerArgs(NamedTuple):
    x: Any  # TMA descriptors; with GATHERED x is an address
    weights: Any
    gather: Any
    x_stride: Any  # of its rows
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
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    x, weights, schedule = args.x, args.weights, args.schedule
    cursor = schedule.first
    num_loaded = gl.to_tensor(0)
    for index in range(schedule.first_work_tile, schedule.num_work_tiles, gl.num_programs(0)):
        tile = work_tile(index, cursor, schedule, TRAITS)
        cursor, first_row, column = tile.cursor, tile.first_row, tile.column
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
                    coords = [0, row, block * BLOCK_K] if TRAITS.A_K_MAJOR else [0, block * BLOCK_K, row]
                    load_tile(x, coords, full, args.buffers.a.index(stage * NUM_CONSUMERS + w))
            load_weights(args, cursor.group, column, block, stage, full, TRAITS)
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, NUM_CONSUMERS)


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
        stored_row = row.to(gl.int64)
    else:
        stored_row = gl.load(index + row, mask=inside, other=0).to(gl.int64)
    rounded = gl.convert_layout(value.to(target.dtype.element_ty), LAYOUT)
    gl.store(
        target + stored_row[:, None] * row_stride + column[None, :], rounded,
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
        scales = ep.weight_scale + group * ep.weight_scale_group_stride
        weight_scale = gl.load(scales + column * ep.weight_scale_column_stride, mask=in_columns, other=0.0)
        value = value * x_scale[:, None] * weight_scale[None, :]
    if ep.bias is not None:
        biases = ep.bias + group.to(gl.int64) * ep.bias_group_stride
        value += gl.load(biases + column * ep.bias_column_stride, mask=in_columns, other=0.0).to(gl.float32)[None, :]
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
    COUNT: gl.constexpr = acc.shape[1] // CHUNK_N
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
def _store_zeros(target, index, first_row, end, first_column, count, width):
    """Stores zeros to `count` columns of a target that has `width`, and to the rows that `index` names."""
    COLUMNS: gl.constexpr = 64
    zeros = gl.zeros([64, COLUMNS], gl.float32, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    for row in range(first_row, end, 64):
        for column in range(first_column, first_column + count, COLUMNS):
            _store_rows(target, zeros, index, row, end, column, width, width)


@gluon.jit
def _consume(w: gl.constexpr, args, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: rows w ROWS to (w + 1) ROWS of all work tiles."""
    BLOCK_M: gl.constexpr = TRAITS.ROWS * TRAITS.NUM_CONSUMERS
    OUT_N: gl.constexpr = TRAITS.BLOCK_N if TRAITS.GATE == "" else TRAITS.BLOCK_N // 2  # columns of y in a work tile
    schedule, k_blocks = args.schedule, args.k_blocks
    cursor = schedule.first
    position = gl.to_tensor(0)  # K blocks in the ring before this work tile
    for index in range(schedule.first_work_tile, schedule.num_work_tiles, gl.num_programs(0)):
        row_tile = index // schedule.n_tiles
        cursor = advance(cursor, row_tile, schedule, BLOCK_M)
        first_row = cursor.begin + (row_tile - cursor.tiles_before) * BLOCK_M + w * TRAITS.ROWS
        tile_column = column_tile(index, row_tile, schedule.n_tiles)
        if cursor.group < schedule.groups:
            if first_row < cursor.end:
                if TRAITS.GATE == "halves":
                    gate, up = multiply_gate_up(args, position, k_blocks, w, TRAITS)
                    _store_epilogue(gate, up, args, cursor, first_row, tile_column, TRAITS)
                else:
                    if TRAITS.TAIL_N > 0 and tile_column == schedule.n_tiles - 1:
                        tail = multiply_tail(args, position, k_blocks, w, TRAITS)
                        _store_epilogue(tail, tail, args, cursor, first_row, tile_column, TRAITS)
                    else:
                        acc = multiply(args, position, k_blocks, w, TRAITS)[0]
                        _store_epilogue(acc, acc, args, cursor, first_row, tile_column, TRAITS)
            else:
                skip_work_tile(args, position, k_blocks, TRAITS)
            position += k_blocks
        else:
            # Rows behind the last group. Zeros need no order of gate and up: work tiles have BLOCK_N columns of z each.
            ep, end = args.epilogue, gl.minimum(cursor.end, first_row + TRAITS.ROWS)
            _store_zeros(ep.y, ep.scatter, first_row, end, tile_column * OUT_N, OUT_N, ep.columns)
            if ep.preactivation is not None:
                first_column = tile_column * TRAITS.BLOCK_N
                _store_zeros(ep.preactivation, None, first_row, end, first_column, TRAITS.BLOCK_N, ep.n)


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def grouped_matmul_kernel(
    x, weights, offsets, gather, x_stride, epilogue, rows, groups, n_tiles, k_blocks, TRAITS: gl.constexpr
):  # fmt: skip
    """y [out_rows, columns]. x [1, rows, k] and weights [groups, k, n] are TMA descriptors; with GATHERED, x is the
    address of [tokens, k]. `epilogue` is a GroupedEpilogue."""
    BLOCK_M: gl.constexpr = TRAITS.ROWS * TRAITS.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    A_SHAPE: gl.constexpr = [1, TRAITS.ROWS, TRAITS.BLOCK_K] if TRAITS.A_K_MAJOR else [1, TRAITS.BLOCK_K, TRAITS.ROWS]
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, weights.dtype)
    buffers = _Buffers(
        gl.allocate_shared_memory(weights.dtype, [NUM_STAGES * TRAITS.NUM_CONSUMERS] + A_SHAPE, A_LAYOUT),
        gl.allocate_shared_memory(weights.dtype, [NUM_STAGES * HALVES] + weights.block_shape, weights.layout),
    )
    full = new_barriers(NUM_STAGES, 2 if TRAITS.GATHERED else 1)
    schedule = start_schedule(offsets, groups, rows, n_tiles, BLOCK_M, TRAITS.GROUPS)
    synchronize()  # else the compiler does so in the consumers' loops, since these wait for the barriers
    consumer_args = _ConsumerArgs(buffers, full, schedule, k_blocks, epilogue)
    producer_args = _ProducerArgs(x, weights, gather, x_stride, buffers, full, schedule, k_blocks, epilogue.columns)
    if TRAITS.GATHERED:
        specialize_warps(
            _consume, (consumer_args, TRAITS), TRAITS.NUM_CONSUMERS, TRAITS.CONSUMER_REGISTERS,
            produce_gathered, (producer_args, TRAITS), TRAITS.PRODUCER_REGISTERS, 4,
        )  # fmt: skip
    else:
        specialize_warps(
            _consume, (consumer_args, TRAITS), TRAITS.NUM_CONSUMERS, TRAITS.CONSUMER_REGISTERS,
            _produce, (producer_args, TRAITS), TRAITS.PRODUCER_REGISTERS,
        )  # fmt: skip
