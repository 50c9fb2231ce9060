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
each block by its scales and adds it to the accumulator in float32, while the tensor cores compute the second block's
product, or the other consumers'. The scales of a block are loaded SCALES_AHEAD blocks before: they come from device
memory when all programs reach a block at the same time.

WGMMA reads 16-bit operands in either order. An operand whose K index is contiguous (K-major) is loaded as
[rows, BLOCK_K]; one whose rows are contiguous (MN-major) as [BLOCK_K, rows], and its tile is then transposed as a view.
Operands of 8 and 32 bits (fp8, int8, tf32) must be K-major. Elements outside a tensor are zero: TMA fills them in, and
does not store them.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.pipeline_gluon import PipelineState, next_stage
from flashkernel.core.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    new_barriers,
    reinterpret,
    specialize_warps,
    synchronize,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.matmul.hopper.epilogue import EpilogueArgs, await_partials, store_epilogue, store_partial
from flashkernel.ops.matmul.hopper.epilogue import column_chunks as column_chunks  # for grouped products
from flashkernel.ops.matmul.hopper.schedule import Schedule, num_work_tiles, work_tile

SCALES_AHEAD = gl.constexpr(4)  # K blocks between the load of a block's scales and their use
# Whether these are multiples of 16 makes no difference, and would only compile the kernel again. They are arguments of
# their own, since Triton looks at every element of a tuple.
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
    Z_TMA: bool = False  # z, or with DACT dz, is stored by TMA as C is, in C's dtype
    QUANTIZE: str = ""  # how C becomes fp8: "scale" divides by out_scale, "block" by a chunk's scales, or "saturate"


class Buffers(NamedTuple):
    """Tiles in shared memory: A by stage and consumer, B by stage, chunks of C by consumer.

    Gate and up (GATED) are side by side in `b`: the producer's `b` has the stages' two halves, and the consumers' `b`
    whole stages. A second tile of another size has `b_second`.
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
def _b_coords(batch, column, block, TRAITS: gl.constexpr):
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
                a_coords = [a_batch, row, block * BLOCK_K] if TRAITS.A_K_MAJOR else [a_batch, block * BLOCK_K, row]
                load_tile(a, a_coords, full, buffers.a.index(stage * A_TILES + w))
            load_tile(b, _b_coords(b_batch, column, block, TRAITS), full, buffers.b.index(stage * HALVES))
            if HAS_SECOND:
                coords = _b_coords(b_batch, column + TO_SECOND, block, TRAITS)
                if TRAITS.GATED:
                    load_tile(b_second, coords, full, buffers.b.index(stage * 2 + 1))
                else:
                    load_tile(b_second, coords, full, buffers.b_second.index(stage))
            num_loaded += 1
    for later in gl.static_range(NUM_STAGES):  # a named barrier must not be left half full
        if num_loaded + later >= NUM_STAGES:
            named_barrier_sync((num_loaded + later) % NUM_STAGES, A_TILES)


@gluon.jit
def a_operand(args, stage, w: gl.constexpr, TRAITS: gl.constexpr):
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
    a = a_operand(args, stage, w, TRAITS)
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
def _block_scale(args, tile, row, number, num_blocks, TRAITS: gl.constexpr):
    """Returns the scale of each of a consumer's rows for the product of a work tile's K block `number`."""
    ep, block = args.epilogue, tile.k_begin + gl.minimum(number, num_blocks - 1)
    strides = ep.scale_strides
    a_scales = ep.scales.a + tile.batch * strides.a_batch + row * strides.a_row
    b_scale = ep.scales.b + tile.batch * strides.b_batch + block * strides.b_block
    column = tile.column * TRAITS.BLOCK_N // 128
    a_scale = gl.load(a_scales + block * strides.a_block, mask=row < args.m, other=0.0)
    return a_scale, gl.load(b_scale + column * strides.b_column)


@gluon.jit
def _issue_block(args, loaded, w: gl.constexpr, TRAITS: gl.constexpr):
    """Issues the product of the K block that is number `loaded` in the ring, once TMA has loaded it."""
    stage = loaded % TRAITS.NUM_STAGES
    mbarrier.wait(args.full.index(stage), (loaded // TRAITS.NUM_STAGES) & 1)
    b = _b_operand(args.buffers.b, stage, TRAITS.BLOCK_N, TRAITS)
    zeros = _zeros(TRAITS.BLOCK_N, TRAITS)
    return warpgroup_mma(a_operand(args, stage, w, TRAITS), b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_block(acc, product, scale, loaded, IN_FLIGHT: gl.constexpr, TRAITS: gl.constexpr):
    """Returns acc + product * scale once the product is there and IN_FLIGHT later ones may still be computed."""
    product = warpgroup_mma_wait(IN_FLIGHT, deps=[product])
    named_barrier_arrive(loaded % TRAITS.NUM_STAGES, TRAITS.NUM_CONSUMERS)
    a_scale, b_scale = scale
    return acc + product * (a_scale * b_scale)[:, None]


@gluon.jit
def _multiply_block_scaled(args, tile, position, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sum over a work tile's K blocks, each multiplied by its scales.

    Two products are issued at a time, and the first is added to the sum while the second is computed. A product that is
    under way from one iteration to the next would make ptxas wait for each of them.
    """
    ROWS: gl.constexpr = TRAITS.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TRAITS.BLOCK_N, TRAITS.BLOCK_K // 4])
    row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    num_blocks = tile.k_end - tile.k_begin
    acc = _zeros(TRAITS.BLOCK_N, TRAITS)
    scale = _block_scale(args, tile, row, 0, num_blocks, TRAITS)
    scale_1 = _block_scale(args, tile, row, 1, num_blocks, TRAITS)
    scale_2 = _block_scale(args, tile, row, 2, num_blocks, TRAITS)
    scale_3 = _block_scale(args, tile, row, 3, num_blocks, TRAITS)
    for pair in range(num_blocks // 2):
        number = 2 * pair
        scale_4 = _block_scale(args, tile, row, number + SCALES_AHEAD, num_blocks, TRAITS)
        scale_5 = _block_scale(args, tile, row, number + SCALES_AHEAD + 1, num_blocks, TRAITS)
        even = _issue_block(args, position + number, w, TRAITS)
        odd = _issue_block(args, position + number + 1, w, TRAITS)
        acc = _add_block(acc, even, scale, position + number, 1, TRAITS)
        acc = _add_block(acc, odd, scale_1, position + number + 1, 0, TRAITS)
        scale, scale_1, scale_2, scale_3 = scale_2, scale_3, scale_4, scale_5
    if num_blocks % 2 == 1:
        last = position + num_blocks - 1
        acc = _add_block(acc, _issue_block(args, last, w, TRAITS), scale, last, 0, TRAITS)
    return (acc,)


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
                store_partial(acc, args, w, TRAITS)
            else:
                await_partials(args, tile, w, TRAITS)
                store_epilogue(acc, args, tile, w, TRAITS)
        else:
            store_epilogue(acc, args, tile, w, TRAITS)
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
    a, b, b_second, c, z_target, up_target, pointers, scales, partials, strides, scale_strides,
    m, n, m_tiles, n_tiles, k_blocks, batch, num_splits, num_streamed, TRAITS: gl.constexpr,
):  # fmt: skip
    """C [num_splits * batch, m, n].

    a, b, b_second, c, z_target and up_target are TMA descriptors, which Gluon takes as arguments of their own; c is an
    address if not TMA_STORE. `pointers` and `strides` are EpiloguePointers and EpilogueStrides; `scales`,
    `scale_strides` and `partials` are Scales, ScaleStrides and PartialSums.
    """
    A_TILES: gl.constexpr = 1 if TRAITS.PINGPONG else TRAITS.NUM_CONSUMERS
    B_TILES: gl.constexpr = 2 if TRAITS.GATED else 1
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
    epilogue = EpilogueArgs(pointers, z_target, up_target, scales, strides, scale_strides, partials)
    consumed = Buffers(a_buffers, b_stages, second_buffers, c_buffers)
    produced = Buffers(a_buffers, b_buffers, second_buffers, c_buffers)
    specialize_warps(
        _consume, (ConsumerArgs(c, consumed, full, order, schedule, epilogue, m, n), TRAITS), TRAITS.NUM_CONSUMERS,
        TRAITS.CONSUMER_REGISTERS, _produce, (ProducerArgs(a, b, b_second, produced, full, schedule), TRAITS),
        TRAITS.PRODUCER_REGISTERS,
    )  # fmt: skip
