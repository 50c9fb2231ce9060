"""C = epilogue(A B) on Hopper: a persistent kernel with a producer warp and one to three consumer warpgroups.

1. A program stays on its SM and takes work tiles program, program + num_programs, ... (`work_tile_at`). A work tile is
   BLOCK_M x BLOCK_N of C and a range of K blocks. Neighbours in that order share rows of A and columns of B in L2.
2. The producer warp loads tiles of A and B by TMA into a ring of NUM_STAGES stages, and signals each stage on an
   mbarrier. It runs ahead of the consumers, into the next work tile as well.
3. A consumer warpgroup multiplies its ROWS rows with all BLOCK_N columns by WGMMA. It issues the product of K block k,
   then waits for that of block k - 1 and releases its stage through a named barrier.
4. The epilogue goes through the accumulator in chunks of 8 KB: it is applied in registers, the chunk is staged in
   shared memory, and TMA stores it while the next chunk (and the next work tile) is computed.

Cooperative (not PINGPONG): all consumers work on the same tile; consumer w has rows w ROWS to (w + 1) ROWS.
PINGPONG: consumers alternate; each computes whole work tiles, so that the epilogue of one runs beside the products of
the other. A consumer starts when the one before it has issued its last product (`order` barriers): a phase of an
mbarrier is known by its parity alone, so that nobody may wait for a stage more than one round of the ring ahead.

GATED: B and `up` are multiplied at once. A stage of B's ring has BLOCK_N / 2 columns of each, side by side, so that one
WGMMA computes both and the halves of its accumulator are gate and up of BLOCK_N / 2 columns of C.

BLOCK_SCALED (fp8): a scale belongs to 128 elements of K, which are one K block. A consumer multiplies the product of
each block by its scales and adds it to the accumulator in float32, while the products of the other consumer run.

WGMMA reads 16-bit operands in either order. An operand whose K index is contiguous (K-major) is loaded as
[rows, BLOCK_K]; one whose rows are contiguous (MN-major) as [BLOCK_K, rows], and its tile is then transposed as a view.
Operands of 8 and 32 bits (fp8, int8, tf32) must be K-major. Elements outside a tensor are zero: TMA fills them in, and
does not store them.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.epilogue_triton import apply_epilogue, block_scale, pull_back_activation, saturate_fp8
from flashkernel.blocks.pipeline_gluon import PipelineState, next_stage, split_columns
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    new_barriers,
    reinterpret,
    specialize_warps,
    store_tile,
    synchronize,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.matmul.triton.store import add_bias
from flashkernel.ops.matmul.triton.tiles import tile_position

# Whether these are multiples of 16 makes no difference, and would only compile the kernel again.
SIZES = ("m", "n", "m_tiles", "n_tiles", "k_blocks", "batch", "num_splits")


class MatmulTraits(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int  # of C, per consumer
    BLOCK_N: int
    BLOCK_K: int
    NUM_CONSUMERS: int
    NUM_STAGES: int
    PINGPONG: bool
    GROUP_M: int  # tiles of rows that are worked on at the same time
    CHUNK_N: int  # columns of a staged chunk of C
    STORE_STAGES: int  # chunks of C in shared memory, per consumer; divides those of a work tile
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    A_BATCHED: bool  # False: all batch entries share one A
    B_BATCHED: bool
    RESIDUAL_BATCHED: bool
    CHAIN_BEFORE: str  # the epilogue up to the activation
    CHAIN_AFTER: str  # from the activation on
    SCALED: bool  # the sum, by a_scale[row] * b_scale[column]
    BLOCK_SCALED: bool  # each K block's product, by a_scale[row, block] * b_scale[block, column // 128]
    INTEGER: bool  # int8 operands, int32 sums
    PREACTIVATION: bool  # what CHAIN_BEFORE gives is stored, too
    TMA_STORE: bool  # False: rows of C are not a multiple of 16 bytes
    CONSUMER_REGISTERS: int  # per thread, as PRODUCER_REGISTERS
    PRODUCER_REGISTERS: int
    GATED: bool = False
    PARTIALS: bool = False  # C is partial sums: of gate and up, two matrices for each entry
    DACT: bool = False  # the product is the gradient of CHAIN_AFTER's activation: z is read, dz and C are written
    PACKED: str = ""  # how z and dz hold gate and up
    QUANTIZE: str = (
        ""  # C is fp8: "scale" divides it by out_scale, "block" by scales of a chunk's rows, "saturate" by 1
    )


class Schedule(NamedTuple):
    """All work tiles. Splits are the outermost index, then batch entries."""

    m_tiles: Any
    n_tiles: Any
    k_blocks: Any
    batch: Any
    num_splits: Any


class WorkTile(NamedTuple):
    """`entry` is split * batch + batch entry: which matrix of C (or of the partial sums) the tile is part of."""

    entry: Any
    batch: Any
    row: Any  # in units of BLOCK_M, as column of BLOCK_N
    column: Any
    k_begin: Any  # in units of BLOCK_K
    k_end: Any


class EpilogueArgs(NamedTuple):
    """Addresses and strides (in elements) of what the epilogue reads and writes. Matrices have (batch, row) strides."""

    z: Any  # the preactivation
    dz: Any
    bias: Any
    up_bias: Any
    residual: Any
    seed: Any  # of dropout: a `seed_word`, or None
    device_seed: Any  # the address of a number to be scrambled
    out_scale: Any  # C in fp8 is divided by it
    block_scales: Any  # scales of C in fp8 are written there
    a_scale: Any
    b_scale: Any
    up_scale: Any
    c_strides: Any
    z_strides: Any
    dz_strides: Any
    bias_stride: Any
    residual_strides: Any
    out_scale_strides: Any
    block_scales_strides: Any
    a_scale_batch_stride: Any
    a_scale_stride: Any
    a_scale_block_stride: Any  # from one K block to the next (BLOCK_SCALED)
    b_scale_batch_stride: Any
    b_scale_stride: Any
    b_scale_block_stride: Any


class Buffers(NamedTuple):
    """Tiles in shared memory: A by stage and consumer, B by stage, chunks of C by consumer.

    With GATED the producer's B has the stages' two halves, and the consumers' B whole stages.
    """

    a: Any
    b: Any
    c: Any


class ProducerArgs(NamedTuple):
    a: Any  # TMA descriptors
    b: Any
    up: Any
    buffers: Any
    full: Any  # mbarriers: TMA has loaded a stage
    schedule: Any


class ConsumerArgs(NamedTuple):
    c: Any  # TMA descriptor, or with TMA_STORE False an address
    buffers: Any
    full: Any
    order: Any  # mbarriers: it is consumer w's turn (PINGPONG)
    schedule: Any
    epilogue: Any
    m: Any
    n: Any


@gluon.jit
def _num_work_tiles(schedule):
    return schedule.m_tiles * schedule.n_tiles * schedule.batch * schedule.num_splits


@gluon.jit
def work_tile_at(index, schedule, GROUP_M: gl.constexpr):
    """Returns work tile number `index`."""
    tiles = schedule.m_tiles * schedule.n_tiles
    entry, tile = index // tiles, index % tiles
    split, batch = entry // schedule.batch, entry % schedule.batch
    row, column = tile_position(tile, schedule.m_tiles, schedule.n_tiles, GROUP_M)
    k_begin = split * schedule.k_blocks // schedule.num_splits
    k_end = (split + 1) * schedule.k_blocks // schedule.num_splits
    return WorkTile(entry, batch, row, column, k_begin, k_end)


@gluon.jit
def _produce(args, TRAITS: gl.constexpr):
    """The producer warp: loads A and B of all work tiles."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    A_TILES: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    B_TILES: gl.constexpr = 2 if TRAITS.GATED else 1
    a, b, buffers = args.a, args.b, args.buffers
    num_loaded = gl.to_tensor(0)
    for index in range(gl.program_id(0), _num_work_tiles(args.schedule), gl.num_programs(0)):
        tile = work_tile_at(index, args.schedule, TRAITS.GROUP_M)
        a_batch = tile.batch if TRAITS.A_BATCHED else 0
        b_batch = tile.batch if TRAITS.B_BATCHED else 0
        column = tile.column * (TRAITS.BLOCK_N // B_TILES)
        for block in range(tile.k_begin, tile.k_end):
            stage = num_loaded % NUM_STAGES
            if num_loaded >= NUM_STAGES:
                named_barrier_sync(stage, A_TILES)
            full = args.full.index(stage)
            mbarrier.expect(full, A_TILES * a.block_type.nbytes + B_TILES * b.block_type.nbytes)
            for w in gl.static_range(A_TILES):
                row = (tile.row * A_TILES + w) * ROWS
                a_place = [a_batch, row, block * BLOCK_K] if TRAITS.A_K_MAJOR else [a_batch, block * BLOCK_K, row]
                load_tile(a, a_place, full, buffers.a.index(stage * A_TILES + w))
            b_place = [b_batch, column, block * BLOCK_K] if TRAITS.B_K_MAJOR else [b_batch, block * BLOCK_K, column]
            load_tile(b, b_place, full, buffers.b.index(stage * B_TILES))
            if TRAITS.GATED:
                load_tile(args.up, b_place, full, buffers.b.index(stage * B_TILES + 1))
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, A_TILES)


@gluon.jit
def _issue(args, state, acc, w: gl.constexpr, USE_ACC: gl.constexpr, TRAITS: gl.constexpr):
    """Issues acc += A B (or acc = A B) of a stage, once TMA has loaded it."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    stage, phase = state
    mbarrier.wait(args.full.index(stage), phase)
    if TRAITS.PINGPONG:
        a_tile = args.buffers.a.index(stage)
    else:
        a_tile = args.buffers.a.index(stage * TRAITS.NUM_CONSUMERS + w)
    b_tile = args.buffers.b.index(stage)
    if TRAITS.A_K_MAJOR:
        a_operand = a_tile.reshape([ROWS, BLOCK_K])
    else:
        a_operand = a_tile.reshape([BLOCK_K, ROWS]).permute((1, 0))
    if TRAITS.B_K_MAJOR:
        b_operand = b_tile.reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
    else:
        b_operand = b_tile.reshape([BLOCK_K, BLOCK_N])
    return warpgroup_mma(a_operand, b_operand, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _multiply(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sum [ROWS, BLOCK_N] over `num_blocks` K blocks, which begin at `position` in the ring."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    RELEASED_BY: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    MMA_K: gl.constexpr = TRAITS.BLOCK_K // 4  # 32 bytes of K
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, MMA_K])
    ACC_DTYPE: gl.constexpr = gl.int32 if TRAITS.INTEGER else gl.float32
    zeros = gl.zeros([ROWS, BLOCK_N], ACC_DTYPE, ACC_LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    acc = warpgroup_mma_wait(1, deps=[_issue(args, state, zeros, w, False, TRAITS)])
    for _ in range(1, num_blocks):
        previous = state.stage
        state = next_stage(state, NUM_STAGES)
        acc = warpgroup_mma_wait(1, deps=[_issue(args, state, acc, w, True, TRAITS)])
        named_barrier_arrive(previous, RELEASED_BY)
    if TRAITS.PINGPONG:
        mbarrier.arrive(args.order.index((w + 1) % TRAITS.NUM_CONSUMERS), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    named_barrier_arrive(state.stage, RELEASED_BY)
    return acc


@gluon.jit
def _multiply_block_scaled(args, tile, position, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sum [ROWS, BLOCK_N] over a work tile's K blocks, each multiplied by its scales."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    MMA_K: gl.constexpr = TRAITS.BLOCK_K // 4
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, MMA_K])
    ep = args.epilogue
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, ACC_LAYOUT)
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, ACC_LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC_LAYOUT))
    a_scales = ep.a_scale + tile.batch * ep.a_scale_batch_stride + row * ep.a_scale_stride
    column_block = tile.column * BLOCK_N // 128
    b_scales = ep.b_scale + tile.batch * ep.b_scale_batch_stride + column_block * ep.b_scale_stride
    for block in range(tile.k_begin, tile.k_end):
        # Asked for before the product, which takes longer than these loads.
        a_scale = gl.load(a_scales + block * ep.a_scale_block_stride, mask=row < args.m, other=0.0)
        scale = a_scale * gl.load(b_scales + block * ep.b_scale_block_stride)
        product = warpgroup_mma_wait(0, deps=[_issue(args, state, zeros, w, False, TRAITS)])
        named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
        acc += product * scale[:, None]
        state = next_stage(state, NUM_STAGES)
    return acc


@gluon.jit
def _column_chunks(x, COUNT: gl.constexpr):
    """Returns a tuple of COUNT equal parts of x's columns."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = split_columns(x)
        return _column_chunks(left, COUNT // 2) + _column_chunks(right, COUNT // 2)


@gluon.jit
def _store_epilogue(acc, args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores epilogue(acc) chunk by chunk."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    TILE_N: gl.constexpr = TRAITS.BLOCK_N // 2 if TRAITS.GATED else TRAITS.BLOCK_N  # columns of C
    COUNT: gl.constexpr = TILE_N // CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    ep, m, n = args.epilogue, args.m, args.n
    if TRAITS.PINGPONG:
        first_row = tile.row * ROWS
    else:
        first_row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    in_rows = row < m
    if TRAITS.SCALED:
        a_scale = gl.load(
            ep.a_scale + tile.batch * ep.a_scale_batch_stride + row * ep.a_scale_stride, mask=in_rows, other=0.0
        )
        b_scales = tile.batch * ep.b_scale_batch_stride  # and up's
    if TRAITS.GATED:
        gate, up = split_columns(acc)
        chunks, up_chunks = _column_chunks(gate, COUNT), _column_chunks(up, COUNT)
    else:
        chunks = _column_chunks(acc, COUNT)
        up_chunks = chunks
    STORES: gl.constexpr = 2 if TRAITS.PARTIALS and TRAITS.GATED else 1  # of a chunk
    entry = tile.entry * STORES
    for chunk in gl.static_range(COUNT):
        first_column = tile.column * TILE_N + chunk * CHUNK_N
        column = first_column + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
        in_columns = column < n
        value = gl.convert_layout(chunks[chunk], LAYOUT).to(gl.float32)
        up_value = value
        if TRAITS.GATED:
            up_value = gl.convert_layout(up_chunks[chunk], LAYOUT).to(gl.float32)
        if TRAITS.SCALED:
            b_scale = gl.load(ep.b_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
            value = value * a_scale[:, None] * b_scale[None, :]
            if TRAITS.GATED:
                up_scale = gl.load(ep.up_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
                up_value = up_value * a_scale[:, None] * up_scale[None, :]
        if not TRAITS.PARTIALS:
            value = _apply_chain(value, up_value, ep, tile, row, column, in_rows, in_columns, m, n, TRAITS)
            if TRAITS.QUANTIZE != "":
                value = _quantize(value, ep, tile, row, in_rows, in_columns, first_column, n, TRAITS)
        _store_chunk(value, args, chunk * STORES, entry, first_row, first_column, row, column, w, TRAITS)
        if STORES == 2:
            _store_chunk(
                up_value, args, chunk * STORES + 1, entry + 1, first_row, first_column, row, column, w, TRAITS
            )  # fmt: skip


@gluon.jit
def _apply_chain(value, up, ep, tile, row, column, in_rows, in_columns, m, n, TRAITS: gl.constexpr):
    """Returns the epilogue of a chunk of the product, or with DACT the activation of z; stores z or dz."""
    CHAIN_BEFORE: gl.constexpr = TRAITS.CHAIN_BEFORE
    CHAIN_AFTER: gl.constexpr = TRAITS.CHAIN_AFTER
    PACKED: gl.constexpr = TRAITS.PACKED
    batch = tile.batch.to(gl.int64)
    STEP: gl.constexpr = 2 if PACKED == "interleaved" else 1  # from one gate to the next
    to_up = 1 if PACKED == "interleaved" else n
    place = row.to(gl.int64)[:, None]
    z_column = column[None, :] * STEP
    inside = in_rows[:, None] & in_columns[None, :]
    if TRAITS.DACT:
        z = ep.z + (batch * ep.z_strides[0] + place * ep.z_strides[1] + z_column)
        dz = ep.dz + (batch * ep.dz_strides[0] + place * ep.dz_strides[1] + z_column)
        z_value = gl.load(z, mask=inside, other=0.0).to(gl.float32)
        z_up = z_value
        if PACKED != "":
            z_up = gl.load(z + to_up, mask=inside, other=0.0).to(gl.float32)
        value, gradient, up_gradient = pull_back_activation(value, z_value, z_up, CHAIN_AFTER)
        gl.store(dz, gradient, mask=inside)
        if PACKED != "":
            gl.store(dz + to_up, up_gradient, mask=inside)
        return value
    else:
        value, up = add_bias(value, up, column, in_columns, ep.bias, ep.up_bias, ep.bias_stride, CHAIN_BEFORE, PACKED)
        if TRAITS.PREACTIVATION:
            z = ep.z + (batch * ep.z_strides[0] + place * ep.z_strides[1] + z_column)
            gl.store(z, value, mask=inside)
            if PACKED != "":
                gl.store(z + to_up, up, mask=inside)
        residual = ep.residual
        if TRAITS.RESIDUAL_BATCHED:
            residual = ep.residual + batch * ep.residual_strides[0]
        return apply_epilogue(
            value, up, row, column, column, in_rows, in_columns, ep.bias, ep.up_bias, ep.bias_stride,
            residual, ep.residual_strides[1], CHAIN_AFTER, ep.seed, ep.device_seed, batch * m, n,
        )  # fmt: skip


@gluon.jit
def _quantize(value, ep, tile, row, in_rows, in_columns, first_column, n, TRAITS: gl.constexpr):
    """Divides a chunk by its rows' scales and saturates it; the scales are given, or found and stored."""
    batch, place = tile.batch.to(gl.int64), row.to(gl.int64)
    if TRAITS.QUANTIZE == "block":
        scale = block_scale(value, in_columns)
        target = ep.block_scales + (batch * ep.block_scales_strides[0] + first_column // 128)
        gl.store(target + place * ep.block_scales_strides[1], scale, mask=in_rows & (first_column < n))
        value = value / scale[:, None]
    if TRAITS.QUANTIZE == "scale":
        scales = ep.out_scale + (batch * ep.out_scale_strides[0] + place * ep.out_scale_strides[1])
        value = value / gl.load(scales, mask=in_rows, other=1.0)[:, None]
    return saturate_fp8(value)


@gluon.jit
def _store_chunk(
    value, args, index: gl.constexpr, entry, first_row, first_column, row, column, w: gl.constexpr,
    TRAITS: gl.constexpr,
):  # fmt: skip
    """Stores a chunk of C's matrix `entry`; `index` counts the chunks of a work tile."""
    if TRAITS.TMA_STORE:
        buffer = args.buffers.c.index(w * TRAITS.STORE_STAGES + index % TRAITS.STORE_STAGES)
        tma.store_wait(TRAITS.STORE_STAGES - 1)  # TMA has read the chunk that was staged here
        buffer.reshape([TRAITS.ROWS, TRAITS.CHUNK_N]).store(value.to(args.c.dtype))
        fence_async_shared()
        store_tile(args.c, [entry, first_row, first_column], buffer)
    else:
        start = entry.to(gl.int64) * args.epilogue.c_strides[0] + row.to(gl.int64) * args.epilogue.c_strides[1]
        inside = (row < args.m)[:, None] & (column < args.n)[None, :]
        gl.store(args.c + start[:, None] + column[None, :], value, mask=inside)


@gluon.jit
def _consume(w: gl.constexpr, args, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: its part of all work tiles, or with PINGPONG every NUM_CONSUMERS-th work tile."""
    STEP: gl.constexpr = TRAITS.NUM_CONSUMERS if TRAITS.PINGPONG else 1
    FIRST_PHASE: gl.constexpr = 1 if w == 0 else 0  # nobody comes before consumer 0's first work tile
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    position = gl.to_tensor(0)  # K blocks in the ring before this work tile
    first = program
    order_phase = gl.to_tensor(FIRST_PHASE)
    if TRAITS.PINGPONG:
        for before in gl.static_range(w):
            position += _num_blocks(program + before * num_programs, args.schedule, TRAITS)
        first = program + w * num_programs
    for index in range(first, _num_work_tiles(args.schedule), STEP * num_programs):
        tile = work_tile_at(index, args.schedule, TRAITS.GROUP_M)
        num_blocks = tile.k_end - tile.k_begin
        if TRAITS.PINGPONG:
            mbarrier.wait(args.order.index(w), order_phase)
            order_phase ^= 1
        if TRAITS.BLOCK_SCALED:
            acc = _multiply_block_scaled(args, tile, position, w, TRAITS)
        else:
            acc = _multiply(args, position, num_blocks, w, TRAITS)
        _store_epilogue(acc, args, tile, w, TRAITS)
        position += num_blocks
        for after in gl.static_range(1, STEP):  # those of the other consumers
            position += _num_blocks(index + after * num_programs, args.schedule, TRAITS)
    if TRAITS.TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def _num_blocks(index, schedule, TRAITS: gl.constexpr):
    """Returns the number of K blocks of a work tile."""
    tile = work_tile_at(index, schedule, TRAITS.GROUP_M)
    return tile.k_end - tile.k_begin


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def matmul_kernel(
    a, b, up, c, z, dz, bias, up_bias, residual, seed, device_seed, out_scale, block_scales, a_scale, b_scale, up_scale,
    c_strides, z_strides, dz_strides, bias_stride, residual_strides, out_scale_strides, block_scales_strides,
    a_scale_batch_stride, a_scale_stride, a_scale_block_stride, b_scale_batch_stride, b_scale_stride,
    b_scale_block_stride, m, n, m_tiles, n_tiles, k_blocks, batch, num_splits, TRAITS: gl.constexpr,
):  # fmt: skip
    """C [num_splits * batch, m, n]. a, b, up and c are TMA descriptors; c is an address if not TMA_STORE."""
    A_TILES: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    B_TILES: gl.constexpr = 2 if TRAITS.GATED else 1
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    a_buffers = gl.allocate_shared_memory(a.dtype, [NUM_STAGES * A_TILES] + a.block_shape, a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [NUM_STAGES * B_TILES] + b.block_shape, b.layout)
    b_stages = b_buffers
    if TRAITS.GATED:
        K_MAJOR: gl.constexpr = [NUM_STAGES, 1, TRAITS.BLOCK_N, TRAITS.BLOCK_K]
        N_MAJOR: gl.constexpr = [NUM_STAGES, 1, TRAITS.BLOCK_K, TRAITS.BLOCK_N]
        b_stages = reinterpret(b_buffers, b.dtype, K_MAJOR if TRAITS.B_K_MAJOR else N_MAJOR, b.layout)
    c_buffers = a_buffers
    if TRAITS.TMA_STORE:
        c_buffers = gl.allocate_shared_memory(
            c.dtype, [TRAITS.NUM_CONSUMERS * TRAITS.STORE_STAGES] + c.block_shape, c.layout
        )
    full = new_barriers(NUM_STAGES, 1)
    order = new_barriers(TRAITS.NUM_CONSUMERS, 1)
    synchronize()  # else the compiler does so in the consumers' loops, since these wait for the barriers
    schedule = Schedule(m_tiles, n_tiles, k_blocks, batch, num_splits)
    epilogue = EpilogueArgs(
        z, dz, bias, up_bias, residual, seed, device_seed, out_scale, block_scales, a_scale, b_scale, up_scale,
        c_strides, z_strides, dz_strides, bias_stride, residual_strides, out_scale_strides, block_scales_strides,
        a_scale_batch_stride, a_scale_stride, a_scale_block_stride,
        b_scale_batch_stride, b_scale_stride, b_scale_block_stride,
    )  # fmt: skip
    consumed, produced = Buffers(a_buffers, b_stages, c_buffers), Buffers(a_buffers, b_buffers, c_buffers)
    specialize_warps(
        _consume, (ConsumerArgs(c, consumed, full, order, schedule, epilogue, m, n), TRAITS), TRAITS.NUM_CONSUMERS,
        TRAITS.CONSUMER_REGISTERS, _produce, (ProducerArgs(a, b, up, produced, full, schedule), TRAITS),
        TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
