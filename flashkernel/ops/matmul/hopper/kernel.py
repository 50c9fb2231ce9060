"""C = epilogue(A B) on Hopper: a persistent kernel with a producer warp and one to three consumer warpgroups.

1. A program stays on its SM and computes several work tiles (schedule.py). A work tile is BLOCK_M x BLOCK_N of C and a
   range of K blocks. Tiles that are computed at the same time share rows of A and columns of B in L2.
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

A work tile has one or two tiles of B: BLOCK_N = FIRST_N + SECOND_N columns, an accumulator for each. Two make tiles of
192 columns (128 + 64) possible, which no power of two is.

GATED: B and `b_second`, gate and up, are multiplied at once. A stage of B's ring has BLOCK_N / 2 columns of each, side
by side, so that one WGMMA computes both and the halves of its accumulator are gate and up of BLOCK_N / 2 columns of C.

BLOCK_SCALED (fp8): a scale belongs to 128 elements of K, which are one K block. A consumer multiplies the product of
each block and 128 columns by its scales and adds it to the accumulator in float32, while the products of the other
consumer run. The scales of a block are loaded one block ahead.

WGMMA reads 16-bit operands in either order. An operand whose K index is contiguous (K-major) is loaded as
[rows, BLOCK_K]; one whose rows are contiguous (MN-major) as [BLOCK_K, rows], and its tile is then transposed as a view.
Operands of 8 and 32 bits (fp8, int8, tf32) must be K-major. Elements outside a tensor are zero: TMA fills them in, and
does not store them.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.epilogue_triton import apply_epilogue, pull_back_activation
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
from flashkernel.ops.matmul.hopper.schedule import Schedule, num_work_tiles, work_tile
from flashkernel.ops.matmul.triton.store import add_bias

# Whether these are multiples of 16 makes no difference, and would only compile the kernel again.
SIZES = ("m", "n", "m_tiles", "n_tiles", "k_blocks", "batch", "num_splits", "num_streamed")


class MatmulTraits(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int  # of C, per consumer
    BLOCK_N: int
    SECOND_N: int  # columns of the second tile of B; 0: there is one
    BLOCK_K: int
    NUM_CONSUMERS: int
    NUM_STAGES: int
    PINGPONG: bool
    STREAM_K: bool
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


class EpilogueArgs(NamedTuple):
    """Addresses and strides (in elements) of what the epilogue reads and writes. Matrices have (batch, row) strides."""

    z: Any  # the preactivation
    dz: Any
    bias: Any
    up_bias: Any
    residual: Any
    a_scale: Any
    b_scale: Any
    up_scale: Any
    c_strides: Any
    z_strides: Any
    dz_strides: Any
    bias_stride: Any
    residual_strides: Any
    a_scale_batch_stride: Any
    a_scale_stride: Any
    a_scale_block_stride: Any  # from one K block to the next (BLOCK_SCALED)
    b_scale_batch_stride: Any
    b_scale_stride: Any
    b_scale_block_stride: Any
    partials: Any  # STREAM_K: sums of tiles that another program finishes, [num_programs, BLOCK_M, BLOCK_N]
    partial_flags: Any  # STREAM_K: 1 once they are there, [num_programs, NUM_CONSUMERS]; 0 before


class Buffers(NamedTuple):
    """Tiles in shared memory: A by stage and consumer, B by stage, chunks of C by consumer.

    Two tiles of B of the same size (GATED, BLOCK_SCALED) are side by side in `b`. With GATED the producer's `b` has the
    stages' two halves, and the consumers' `b` whole stages. A second tile of another size has `b_second`.
    """

    a: Any
    b: Any
    b_second: Any
    c: Any


class ProducerArgs(NamedTuple):
    a: Any  # TMA descriptors
    b: Any
    b_second: Any  # up (GATED), or columns FIRST_N to BLOCK_N of B (SECOND_N > 0)
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
def _b_place(batch, column, block, TRAITS: gl.constexpr):
    """Where a tile of B lies in its tensor."""
    if TRAITS.B_K_MAJOR:
        return [batch, column, block * TRAITS.BLOCK_K]
    else:
        return [batch, block * TRAITS.BLOCK_K, column]


@gluon.jit
def _produce(args, TRAITS: gl.constexpr):
    """The producer warp: loads A and B of all work tiles."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    A_TILES: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    HALVES: gl.constexpr = 2 if TRAITS.GATED else 1
    SIDE_BY_SIDE: gl.constexpr = TRAITS.GATED or (TRAITS.BLOCK_SCALED and TRAITS.SECOND_N > 0)
    B_TILES: gl.constexpr = 2 if SIDE_BY_SIDE else 1  # of a stage in buffers.b
    # From the first tile's column to the second's; up's columns are those of the gate.
    TO_SECOND: gl.constexpr = 0 if TRAITS.GATED else TRAITS.BLOCK_N - TRAITS.SECOND_N
    HAS_SECOND: gl.constexpr = TRAITS.GATED or TRAITS.SECOND_N > 0
    a, b, b_second, buffers = args.a, args.b, args.b_second, args.buffers
    SECOND_BYTES: gl.constexpr = b_second.block_type.nbytes if HAS_SECOND else 0
    num_loaded = gl.to_tensor(0)
    for number in range(num_work_tiles(args.schedule, TRAITS.STREAM_K)):
        tile = work_tile(number, args.schedule, TRAITS.GROUP_M, TRAITS.STREAM_K)
        a_batch = tile.batch if TRAITS.A_BATCHED else 0
        b_batch = tile.batch if TRAITS.B_BATCHED else 0
        column = tile.column * (TRAITS.BLOCK_N // HALVES)
        for block in range(tile.k_begin, tile.k_end):
            stage = num_loaded % NUM_STAGES
            if num_loaded >= NUM_STAGES:
                named_barrier_sync(stage, A_TILES)
            full = args.full.index(stage)
            mbarrier.expect(full, A_TILES * a.block_type.nbytes + b.block_type.nbytes + SECOND_BYTES)
            for w in gl.static_range(A_TILES):
                row = (tile.row * A_TILES + w) * ROWS
                a_place = [a_batch, row, block * BLOCK_K] if TRAITS.A_K_MAJOR else [a_batch, block * BLOCK_K, row]
                load_tile(a, a_place, full, buffers.a.index(stage * A_TILES + w))
            load_tile(b, _b_place(b_batch, column, block, TRAITS), full, buffers.b.index(stage * B_TILES))
            if HAS_SECOND:
                place = _b_place(b_batch, column + TO_SECOND, block, TRAITS)
                if SIDE_BY_SIDE:
                    load_tile(b_second, place, full, buffers.b.index(stage * 2 + 1))
                else:
                    load_tile(b_second, place, full, buffers.b_second.index(stage))
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, A_TILES)


@gluon.jit
def _a_operand(args, stage, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns consumer w's tile of A in a stage, [ROWS, BLOCK_K]."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    if TRAITS.PINGPONG:
        tile = args.buffers.a.index(stage)
    else:
        tile = args.buffers.a.index(stage * TRAITS.NUM_CONSUMERS + w)
    if TRAITS.A_K_MAJOR:
        return tile.reshape([ROWS, BLOCK_K])
    else:
        return tile.reshape([BLOCK_K, ROWS]).permute((1, 0))


@gluon.jit
def _b_operand(buffers, stage, COLUMNS: gl.constexpr, TRAITS: gl.constexpr):
    """Returns a tile of B in a stage, [BLOCK_K, COLUMNS]."""
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    if TRAITS.B_K_MAJOR:
        return buffers.index(stage).reshape([COLUMNS, BLOCK_K]).permute((1, 0))
    else:
        return buffers.index(stage).reshape([BLOCK_K, COLUMNS])


@gluon.jit
def _zeros(COLUMNS: gl.constexpr, TRAITS: gl.constexpr):
    """Returns an accumulator [ROWS, COLUMNS]."""
    ROWS: gl.constexpr = TRAITS.ROWS
    MMA_K: gl.constexpr = TRAITS.BLOCK_K // 4  # 32 bytes of K
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, MMA_K])
    DTYPE: gl.constexpr = gl.int32 if TRAITS.INTEGER else gl.float32
    return gl.zeros([ROWS, COLUMNS], DTYPE, LAYOUT)


@gluon.jit
def _accumulators(TRAITS: gl.constexpr):
    """Returns an accumulator for each tile of B."""
    if TRAITS.SECOND_N == 0:
        return (_zeros(TRAITS.BLOCK_N, TRAITS),)
    else:
        return (_zeros(TRAITS.BLOCK_N - TRAITS.SECOND_N, TRAITS), _zeros(TRAITS.SECOND_N, TRAITS))


@gluon.jit
def issue(args, state, acc, w: gl.constexpr, USE_ACC: gl.constexpr, TRAITS: gl.constexpr):
    """Issues acc += A B (or acc = A B) of a stage, once TMA has loaded it; acc is a tuple, one for each tile of B."""
    SECOND_N: gl.constexpr = TRAITS.SECOND_N
    stage, phase = state
    mbarrier.wait(args.full.index(stage), phase)
    a = _a_operand(args, stage, w, TRAITS)
    b = _b_operand(args.buffers.b, stage, TRAITS.BLOCK_N - SECOND_N, TRAITS)
    first = warpgroup_mma(a, b, acc[0], use_acc=USE_ACC, is_async=True)
    if SECOND_N == 0:
        return (first,)
    else:
        b_second = _b_operand(args.buffers.b_second, stage, SECOND_N, TRAITS)
        return (first, warpgroup_mma(a, b_second, acc[1], use_acc=USE_ACC, is_async=True))


@gluon.jit
def _wait(acc, BLOCKS: gl.constexpr):
    """Returns `acc` once at most BLOCKS K blocks' products are under way."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(BLOCKS, deps=[acc[0]]),)
    else:
        return warpgroup_mma_wait(2 * BLOCKS, deps=[acc[0], acc[1]])


@gluon.jit
def multiply(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sums over `num_blocks` K blocks, which begin at `position` in the ring, for each tile of B."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    RELEASED_BY: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    zeros = _accumulators(TRAITS)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    acc = _wait(issue(args, state, zeros, w, False, TRAITS), 1)
    for _ in range(1, num_blocks):
        previous = state.stage
        state = next_stage(state, NUM_STAGES)
        acc = _wait(issue(args, state, acc, w, True, TRAITS), 1)
        named_barrier_arrive(previous, RELEASED_BY)
    if TRAITS.PINGPONG:
        mbarrier.arrive(args.order.index((w + 1) % TRAITS.NUM_CONSUMERS), count=1)
    acc = _wait(acc, 0)
    named_barrier_arrive(state.stage, RELEASED_BY)
    return acc


@gluon.jit
def _block_scales(args, tile, row, step, TRAITS: gl.constexpr):
    """Returns the scales of A's rows and of B's columns for the product number `step` of a work tile."""
    PARTS: gl.constexpr = 2 if TRAITS.SECOND_N > 0 else 1
    ep, block = args.epilogue, tile.k_begin + step // PARTS
    a_scales = ep.a_scale + tile.batch * ep.a_scale_batch_stride + row * ep.a_scale_stride
    b_scales = ep.b_scale + tile.batch * ep.b_scale_batch_stride + block * ep.b_scale_block_stride
    # A second tile that lies outside B has no scale.
    column = gl.minimum(tile.column * TRAITS.BLOCK_N // 128 + step % PARTS, (args.n - 1) // 128)
    a_scale = gl.load(a_scales + block * ep.a_scale_block_stride, mask=row < args.m, other=0.0)
    return a_scale, gl.load(b_scales + column * ep.b_scale_stride)


@gluon.jit
def _multiply_block_scaled(args, tile, position, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sums over a work tile's K blocks, each multiplied by its scales, for each tile of B.

    Both tiles of B have the same size, and their products are one instruction in a loop: written out twice, they would
    have registers of their own, and spill.
    """
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    FIRST_N: gl.constexpr = TRAITS.BLOCK_N - TRAITS.SECOND_N
    PARTS: gl.constexpr = 2 if TRAITS.SECOND_N > 0 else 1
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_N, TRAITS.BLOCK_K // 4])
    first = _zeros(FIRST_N, TRAITS)
    second = _zeros(FIRST_N, TRAITS)
    row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    num_steps = (tile.k_end - tile.k_begin) * PARTS
    a_scale, b_scale = _block_scales(args, tile, row, 0, TRAITS)
    for step in range(num_steps):
        next_a, next_b = _block_scales(args, tile, row, gl.minimum(step + 1, num_steps - 1), TRAITS)
        loaded = position + step // PARTS
        stage, part = loaded % NUM_STAGES, step % PARTS
        mbarrier.wait(args.full.index(stage), (loaded // NUM_STAGES) & 1)
        b = _b_operand(args.buffers.b, stage * PARTS + part, FIRST_N, TRAITS)
        product = warpgroup_mma(
            _a_operand(args, stage, w, TRAITS), b, _zeros(FIRST_N, TRAITS), use_acc=False, is_async=True
        )
        product = warpgroup_mma_wait(0, deps=[product])
        if part == PARTS - 1:
            named_barrier_arrive(stage, TRAITS.NUM_CONSUMERS)
        scale = (a_scale * b_scale)[:, None]
        if part == 0:
            first += product * scale
        else:
            second += product * scale
        a_scale, b_scale = next_a, next_b
    if PARTS == 1:
        return (first,)
    else:
        return (first, second)


@gluon.jit
def column_chunks(x, COUNT: gl.constexpr):
    """Returns a tuple of COUNT equal parts of x's columns."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = split_columns(x)
        return column_chunks(left, COUNT // 2) + column_chunks(right, COUNT // 2)


@gluon.jit
def _chunks(acc, TRAITS: gl.constexpr):
    """Returns a tuple of the accumulators' columns, CHUNK_N each."""
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    chunks = column_chunks(acc[0], (TRAITS.BLOCK_N - TRAITS.SECOND_N) // CHUNK_N)
    if TRAITS.SECOND_N > 0:
        chunks = chunks + column_chunks(acc[1], TRAITS.SECOND_N // CHUNK_N)
    return chunks


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
    chunks = _chunks(acc, TRAITS)  # GATED: those of gate, then those of up
    STORES: gl.constexpr = 2 if TRAITS.PARTIALS and TRAITS.GATED else 1  # of a chunk
    entry = tile.entry * STORES
    for chunk in gl.static_range(COUNT):
        first_column = tile.column * TILE_N + chunk * CHUNK_N
        column = first_column + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
        in_columns = column < n
        value = gl.convert_layout(chunks[chunk], LAYOUT).to(gl.float32)
        up_value = value
        if TRAITS.GATED:
            up_value = gl.convert_layout(chunks[chunk + COUNT], LAYOUT).to(gl.float32)
        if TRAITS.STREAM_K:
            for program in range(tile.first_program, gl.program_id(0)):
                value += gl.load(_partial_places(args, program, chunk, w, TRAITS), cache_modifier=".cg")
                if TRAITS.GATED:
                    up_value += gl.load(_partial_places(args, program, chunk + COUNT, w, TRAITS), cache_modifier=".cg")
        if TRAITS.SCALED:
            b_scale = gl.load(ep.b_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
            value = value * a_scale[:, None] * b_scale[None, :]
            if TRAITS.GATED:
                up_scale = gl.load(ep.up_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
                up_value = up_value * a_scale[:, None] * up_scale[None, :]
        if not TRAITS.PARTIALS:
            value = _apply_chain(value, up_value, ep, tile, row, column, in_rows, in_columns, n, TRAITS)
        _store_chunk(value, args, chunk * STORES, entry, first_row, first_column, row, column, w, TRAITS)
        if STORES == 2:
            _store_chunk(
                up_value, args, chunk * STORES + 1, entry + 1, first_row, first_column, row, column, w, TRAITS
            )  # fmt: skip


@gluon.jit
def _apply_chain(value, up, ep, tile, row, column, in_rows, in_columns, n, TRAITS: gl.constexpr):
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
            residual, ep.residual_strides[1], CHAIN_AFTER,
        )  # fmt: skip


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
def _partial_places(args, program, chunk: gl.constexpr, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the addresses of a chunk of a program's partial sums."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    row = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = chunk * CHUNK_N + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
    first = args.epilogue.partials + program * (TRAITS.NUM_CONSUMERS * ROWS * TRAITS.BLOCK_N)
    return first + row[:, None] * TRAITS.BLOCK_N + column[None, :]


@gluon.jit
def _store_partial(acc, args, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores this program's sums of a tile that another one finishes, and says so."""
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    program = gl.program_id(0)
    chunks = _chunks(acc, TRAITS)
    for chunk in gl.static_range(TRAITS.BLOCK_N // CHUNK_N):
        value = gl.convert_layout(chunks[chunk], LAYOUT).to(gl.float32)
        gl.store(_partial_places(args, program, chunk, w, TRAITS), value)
    synchronize()
    gl.atomic_add(args.epilogue.partial_flags + program * TRAITS.NUM_CONSUMERS + w, 1, sem="release")


@gluon.jit
def _await_partials(args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Waits for the partial sums of the programs that share this tile."""
    for program in range(tile.first_program, gl.program_id(0)):
        flag = args.epilogue.partial_flags + program * TRAITS.NUM_CONSUMERS + w
        ready = gl.atomic_add(flag, 0, sem="acquire")
        while ready == 0:
            ready = gl.atomic_add(flag, 0, sem="acquire")
    synchronize()


@gluon.jit
def _consume(w: gl.constexpr, args, TRAITS: gl.constexpr):
    """Consumer warpgroup `w`: its part of all work tiles, or with PINGPONG every NUM_CONSUMERS-th work tile."""
    STEP: gl.constexpr = TRAITS.NUM_CONSUMERS if TRAITS.PINGPONG else 1
    FIRST: gl.constexpr = w if TRAITS.PINGPONG else 0
    FIRST_PHASE: gl.constexpr = 1 if w == 0 else 0  # nobody comes before consumer 0's first work tile
    position = gl.to_tensor(0)  # K blocks in the ring before this work tile
    order_phase = gl.to_tensor(FIRST_PHASE)
    for before in gl.static_range(FIRST):
        position += _num_blocks(before, args.schedule, TRAITS)
    for number in range(FIRST, num_work_tiles(args.schedule, TRAITS.STREAM_K), STEP):
        tile = work_tile(number, args.schedule, TRAITS.GROUP_M, TRAITS.STREAM_K)
        num_blocks = tile.k_end - tile.k_begin
        if TRAITS.PINGPONG:
            mbarrier.wait(args.order.index(w), order_phase)
            order_phase ^= 1
        if TRAITS.BLOCK_SCALED:
            acc = _multiply_block_scaled(args, tile, position, w, TRAITS)
        else:
            acc = multiply(args, position, num_blocks, w, TRAITS)
        if TRAITS.STREAM_K:
            if tile.k_end < args.schedule.k_blocks:
                _store_partial(acc, args, w, TRAITS)
            else:
                _await_partials(args, tile, w, TRAITS)
                _store_epilogue(acc, args, tile, w, TRAITS)
        else:
            _store_epilogue(acc, args, tile, w, TRAITS)
        position += num_blocks
        for after in gl.static_range(1, STEP):  # those of the other consumers
            position += _num_blocks(number + after, args.schedule, TRAITS)
    if TRAITS.TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def _num_blocks(number, schedule, TRAITS: gl.constexpr):
    """Returns the number of K blocks of a work tile."""
    tile = work_tile(number, schedule, TRAITS.GROUP_M, TRAITS.STREAM_K)
    return tile.k_end - tile.k_begin


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def matmul_kernel(
    a, b, b_second, c, z, dz, bias, up_bias, residual, a_scale, b_scale, up_scale, partials, partial_flags,
    c_strides, z_strides, dz_strides, bias_stride, residual_strides, a_scale_batch_stride, a_scale_stride,
    a_scale_block_stride, b_scale_batch_stride, b_scale_stride, b_scale_block_stride,
    m, n, m_tiles, n_tiles, k_blocks, batch, num_splits, num_streamed, TRAITS: gl.constexpr,
):  # fmt: skip
    """C [num_splits * batch, m, n]. a, b, b_second and c are TMA descriptors; c is an address if not TMA_STORE."""
    A_TILES: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    B_TILES: gl.constexpr = 2 if TRAITS.GATED or (TRAITS.BLOCK_SCALED and TRAITS.SECOND_N > 0) else 1
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    a_buffers = gl.allocate_shared_memory(a.dtype, [NUM_STAGES * A_TILES] + a.block_shape, a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [NUM_STAGES * B_TILES] + b.block_shape, b.layout)
    second_buffers, b_stages = b_buffers, b_buffers
    if TRAITS.SECOND_N > 0 and B_TILES == 1:
        second_buffers = gl.allocate_shared_memory(b_second.dtype, [NUM_STAGES] + b_second.block_shape, b_second.layout)
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
    schedule = Schedule(m_tiles, n_tiles, k_blocks, batch, num_splits, num_streamed)
    epilogue = EpilogueArgs(
        z, dz, bias, up_bias, residual, a_scale, b_scale, up_scale, c_strides, z_strides, dz_strides, bias_stride,
        residual_strides, a_scale_batch_stride, a_scale_stride, a_scale_block_stride, b_scale_batch_stride,
        b_scale_stride, b_scale_block_stride, partials, partial_flags,
    )  # fmt: skip
    consumed = Buffers(a_buffers, b_stages, second_buffers, c_buffers)
    produced = Buffers(a_buffers, b_buffers, second_buffers, c_buffers)
    specialize_warps(
        _consume, (ConsumerArgs(c, consumed, full, order, schedule, epilogue, m, n), TRAITS), TRAITS.NUM_CONSUMERS,
        TRAITS.CONSUMER_REGISTERS, _produce, (ProducerArgs(a, b, b_second, produced, full, schedule), TRAITS),
        TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
